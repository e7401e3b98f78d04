// The form: sends what is asked, shows what is wrong beside the field, follows the job, opens its page.

const form = document.getElementById("form");
const progress = document.getElementById("progress");
const cancel = document.getElementById("cancel");
const submit = form.querySelector("[type=submit]");
let following = null;

function clearErrors() {
  for (const e of form.querySelectorAll(".field .field-error")) e.remove();
  for (const e of form.querySelectorAll("[aria-invalid]")) {
    e.removeAttribute("aria-invalid");
    e.removeAttribute("aria-describedby");
  }
  document.getElementById("error-form").hidden = true;
}

function showErrors(errors) {
  clearErrors();
  let first = null;
  for (const [name, text] of Object.entries(errors)) {
    const field = name && form.elements.namedItem(name);
    if (!field) {
      const general = document.getElementById("error-form");
      general.textContent = text;
      general.hidden = false;
      continue;
    }
    const message = document.createElement("p");
    message.className = "field-error";
    message.id = `error-${name}`;
    message.textContent = text;
    field.after(message);
    field.setAttribute("aria-invalid", "true");
    field.setAttribute("aria-describedby", message.id);
    first ??= field;
  }
  first?.focus();
}

async function ask(path, method = "GET", body = undefined) {
  const response = await fetch(path, { method, headers: body === undefined ? {} : { "Content-Type": "application/json" }, body });
  const kind = response.headers.get("content-type") ?? "";
  return [response, kind.startsWith("application/json") ? await response.json() : { errors: { "": await response.text() } }];
}

function say(text, seconds = "") {
  // Screen readers hear of a new stage, not of each second.
  if (progress.textContent !== text) progress.textContent = text;
  document.getElementById("seconds").textContent = seconds;
}

function show(status) {
  const busy = status.state === "waiting" || status.state === "running";
  submit.disabled = busy;
  cancel.hidden = !busy;
  if (status.state === "waiting") say(`waiting: number ${status.ahead} in the queue`);
  else if (status.state === "running" && status.stages.length) {
    const now = status.stages.at(-1);
    say(`${now.what} ...`, ` ${Math.round(now.seconds)} s`);
  } else if (status.state === "cancelled") say("cancelled");
  else if (status.state === "failed") say("");
  else if (status.state === "done") say("done, opening the page");
}

async function follow(id) {
  following = id;
  while (following === id) {
    const [response, status] = await ask(`/jobs/${id}`);
    if (!response.ok) return showErrors({ "": "the job is no longer known to the server" });
    show(status);
    if (status.state === "done") return void (location.href = `/?job=${id}`);
    if (status.state === "failed") return showErrors({ "": status.error });
    if (status.state === "cancelled") return;
    await new Promise((resolve) => setTimeout(resolve, 400));
  }
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  clearErrors();
  try {
    const fields = Object.fromEntries(new FormData(form));
    const [response, answer] = await ask("/jobs", "POST", JSON.stringify(fields));
    if (!response.ok) return showErrors(answer.errors ?? { "": answer.error });
    await follow(answer.id);
  } catch (error) {
    showErrors({ "": `the server does not answer: ${error.message}` });
    submit.disabled = false;
  }
});

cancel.addEventListener("click", async () => {
  const [, status] = await ask(`/jobs/${following}/cancel`, "POST", "{}");
  show(status);
});

function adapt() {
  // A file's own factory makes its arguments.
  const library = LIBRARIES.some((prefix) => form.elements.model.value.startsWith(prefix));
  for (const name of ["batch", "seq"]) form.elements[name].disabled = !library;
}
form.elements.model.addEventListener("change", adapt);
adapt();
if (form.dataset.following) follow(form.dataset.following);
