"""What a parallel model needs while it runs: process groups, collectives, random numbers, stored parameters, workers.

torch.distributed is known here only.
"""
