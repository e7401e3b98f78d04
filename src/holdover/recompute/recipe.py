"""How a dropped tensor is made again: recipes, what they hold, and when their outputs live.

The rules below are the contract with whoever simulates memory. A *value* is the content of a storage between two
writes. "Pass" is one run of autograd's engine (one graph task); "bytes of a value" are the bytes of its whole storage.

What a recipe holds
 1. A recorded op leaves one recipe. It holds the op, its plain arguments, and for each tensor argument either a
    *reference* (the storage's content was made by a recipe of the same session: no bytes) or a *pin* (it was not:
    the storage is kept alive). A view never has a recipe: it refers to, or pins, the storage it looks at.
 2. A recipe lives while the storage of one of its outputs lives with the content the recipe made, or autograd holds a
    saved tensor of one of its values, or another living recipe refers to it. A pin holds its storage until the last
    recipe that holds the pin dies. Plans bear that in mind: in forward a recipe costs no bytes of its own but its
    pins, an argument that nobody else would have kept becomes kept.
 3. Pins of storages of at most 64 KiB (SMALL_PIN_BYTES) that existed before the session (buffers of the modules on
    the call stack, tensors among the root call's arguments) hold a copy of the storage, made when first pinned, so that
    later changes do no harm. All pins of one content of one storage share one copy. Parameters are never copied.
 4. A random op adds the generator's state (5,056 bytes on CPU, 16 on CUDA), except where its dropout probability is 0.

Copy on write
 5. Before any op of the session (recorded or not) writes to a pinned storage, that storage is copied once (all of it) for
    all of its pins, and they let go of the original. Copies of rule 3 are not copied again. Batch norm's running
    statistics in training count as written, though the schema hides it.
 6. A write that is not recorded ends the storage's recipe: from then on its content is kept. Saved tensors and recipes
    that refer to the content before the write stay right (they hold the old recipe), and take no bytes.
 7. A recorded write makes a new value whose recipe refers to (or pins: then rule 5 copies right away) the old content,
    unless it overwrites all of the storage without reading it (`rules.OVERWRITES`, `out=`): then it refers to nothing.

Replay, in backward, at the moment autograd unpacks a saved tensor of a value that has a recipe
 8. If the tensor that the op made in forward is still alive (the program holds it) and was not written to since, it is
    used: no replay. A view that is still alive does the same only where autograd keeps the view's base alive.
 9. Otherwise the recipes needed run, each once, depth first: the inputs of a recipe in the order of its arguments
    (positional, then keyword), left to right, then the recipe itself. A value that is cached (rule 11) or alive
    (rule 8) ends the descent.
10. During one such replay an intermediate value is freed right after the last recipe of this replay that reads it has
    run, unless rule 11 keeps it. Outputs of an op that nobody asks for are freed as soon as the op returns.
11. A replayed value is cached while it is wanted in this pass: there is a saved tensor of it not unpacked yet in this pass,
    or a recipe that refers to it, is itself wanted in this pass (by this same rule, recursively), and has not been
    replayed in this pass. The moment the last such want goes away (an unpack, a replay, autograd releasing a saved tensor
    unread, a recipe dying), the cache lets go of it; what was handed to autograd lives on as long as autograd's
    node needs it.
12. What is still cached when the pass ends is freed then. Unpacking outside of a pass caches nothing.
13. A replayed in-place op takes over the storage of its old content if that was replayed, is wanted by nobody else, and was
    never handed to autograd; else it works on a copy of the whole storage.
14. A packed value (action "pack") is a recipe with no inputs that holds the packed bytes from the moment its op has run;
    unpacking is its replay, and rules 8 to 12 hold for it. Its storage in forward is not affected.
"""
