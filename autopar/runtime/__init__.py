"""The runtime of a parallel model: process groups, collectives, random numbers, stored parameters, worker processes.

Only this folder uses torch.distributed. Process-wide state is limited to: torch's own process groups; the patch of
`checkpoint.install`; copy streams (`offload`); buffers in flight (`collectives`); and, outside of this folder, a few names of
torch while a model is traced (`capture.trace_guards`), the operators of the user's functions (`operators.autograd_functions`)
and rules (`operators.registry.REGISTERED` and `FOUND`), sent to workers by `custom_ops`, and caches that depend on their keys
only: `@remembered` values per program (`ir.program`), `memory.recompute_closure._FOUND` per assignment, and `functools.cache`s
of pure functions.
"""
