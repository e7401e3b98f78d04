startStack();
startMemory();
startFrontier();
startLife();
startTables();
if (!D.plans.length) for (const e of document.querySelectorAll(".needs-plans")) e.remove();
if (!D.runs.seconds) for (const e of document.querySelectorAll(".needs-times")) e.remove();
document.documentElement.dataset.ready = "yes";
