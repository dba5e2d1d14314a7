"""Cost models: prices in seconds and bytes, each number with its source.

catalog      what a device can do                          device("h100"), device(None, processes=8)
links        what connects the devices of a mesh axis      connect(mesh, device)
collectives  seconds of a collective                       seconds("all_gather", bytes, n, link)
kernels      seconds of arithmetic in real kernels         products_seconds(...), attention_seconds(...)
compute      seconds of an operator at its local shapes    pricer(op, values, device)
saved        what autograd keeps for the backward          saved(op, values)
optimizers   bytes and seconds of an optimizer             optimizer("adamw"), step_seconds(...)
"""
