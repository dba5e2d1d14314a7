"""The runtime of a parallel model: process groups, collectives, random numbers, stored parameters, worker processes.

Only this folder uses torch.distributed. Process-wide state is limited to: torch's own process groups; the patch of
`checkpoint.install`; copy streams (`offload`); buffers in flight (`collectives`); and, outside of this folder, two names of
torch while a model is traced (`capture.trace_guards`) and caches that depend on their keys only:
`operators.registry.REGISTERED` (rules that the user registered, sent to workers by `custom_ops`), `@remembered` values per
program (`ir.program`), `memory.recompute_closure._FOUND` per assignment, and `functools.cache`s of pure functions.
"""
