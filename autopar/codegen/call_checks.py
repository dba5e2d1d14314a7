"""Checks of a call: on the right device, outside of autocast, with planned gradients only, and equal on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from autopar.errors import InputError
from autopar.runtime.call_agreement import Aspect
from autopar.runtime.storage import all_plain

if TYPE_CHECKING:
    from autopar.codegen.module import ParallelModule


def checked_call(module: ParallelModule, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The inputs of a call, on the model's device: a batch on the CPU is copied, as DDP and FSDP2 do.

    Raises InputError if the plan does not cover the call.
    """
    device, signature = module.autopar.context.device, module.autopar.signature
    inputs = [tensor.to(device, non_blocking=True) if tensor.device.type == "cpu" else tensor for tensor in inputs]
    for planned, tensor in zip(signature.tensors, inputs, strict=True):
        if tensor.device.type != device.type:
            raise InputError(
                f"argument {planned.path} is on {tensor.device}, but the model runs on {device}",
                fix=f"move the batch: {planned.path}.to({str(device)!r})",
            )
    if torch.is_autocast_enabled(device.type):
        raise InputError(
            "a parallel module was called under torch.autocast, which its plan does not include",
            fix='parallelize with precision="bf16-mixed" (or "fp16-mixed"), and call the module outside of autocast',
        )
    check_gradients(module, inputs)
    _check_anomaly_mode(module)
    _check_hooks(module)
    if not module.autopar.filled:
        _check_filled(module)
        module.autopar.filled = True
    return inputs


def check_gradients(module: ParallelModule, inputs: Sequence[torch.Tensor]) -> None:
    """Refuse gradients that the plan does not reduce: each rank would have only its term of the sum. Fewer gradients are
    fine.
    """
    if not torch.is_grad_enabled():
        return
    for planned, tensor in zip(module.autopar.signature.tensors, inputs, strict=True):
        if tensor.requires_grad and not planned.requires_grad:
            raise InputError(
                f"argument {planned.path} requires a gradient, which the plan does not compute",
                fix=f"plan with a sample whose {planned.path} requires a gradient, or detach it",
            )
    if constant := module.autopar.constant:
        held = (*module.named_parameters(), *module.named_buffers())
        if thawed := [name for name, tensor in held if tensor.requires_grad and name in constant]:
            more = f" and {len(thawed) - 1} more require" if len(thawed) > 1 else " requires"
            raise InputError(
                f"{thawed[0]}{more} a gradient, but had requires_grad=False when the model was planned",
                names=", ".join(thawed[:8]) + (", ..." if len(thawed) > 8 else ""),
                fix='mode="training"'
                if module.autopar.plan is not None and module.autopar.plan.inference
                else "unfreeze the model and parallelize it again; or parallelize it unfrozen, and freeze afterwards",
            )


def _check_anomaly_mode(module: ParallelModule) -> None:
    """Refuse autograd's search for NaNs if weights are split: it reads gradients in flight, and DTensors have no operator for
    it.
    """
    looks = torch.is_grad_enabled() and torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    if looks and not all_plain(module.parameters()):
        raise InputError(
            "autograd's anomaly mode looks for NaNs in gradients that are still on their way between ranks",
            fix='torch.autograd.set_detect_anomaly(True, check_nan=False), also after a trainer has set it; or strategy="ddp"',
        )


def _check_hooks(module: ParallelModule) -> None:
    """Refuse hooks of submodules: these are never called, since there is one graph."""
    for path, inner in module.named_modules():
        hooks = inner._forward_hooks or inner._forward_pre_hooks or inner._backward_hooks or inner._backward_pre_hooks
        if hooks and path:
            raise InputError(
                f"the hook on {path} would never run: a parallel module has one graph, and its submodules hold tensors only",
                fix="hook the parallel module, return the value from forward, or hook the model before autopar.parallelize",
            )


def _check_filled(module: ParallelModule) -> None:
    held = (*module.named_parameters(), *module.named_buffers())
    if empty := [name for name, tensor in held if tensor.is_meta]:
        raise on_meta(empty, "without values")


def on_meta(names: Sequence[str], so: str) -> InputError:
    """The error for tensors on meta."""
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    return InputError(
        f"{names[0]}{more} on the meta device, {so}",
        names=", ".join(names[:8]) + (", ..." if len(names) > 8 else ""),
        fix="load_state_dict(..., assign=True) (of what dcp.load has read, too), load_pretrained, or "
        "autopar.initialize(parallel, model); the optimizer is made afterwards",
    )


def aspects_of(module: ParallelModule, kind: str, inputs: Mapping[str, torch.Tensor]) -> list[Aspect]:
    """What must not differ between the ranks' calls, besides the values of the inputs."""
    gradients, random = torch.is_grad_enabled(), module.autopar.rng_state
    found = [
        Aspect(kind="call", name="what is called", text=kind),
        Aspect(kind="mode", name="mode", text="train()" if module.training else "eval()"),
        Aspect(kind="gradients", name="gradients", text="enabled" if gradients else "no_grad"),
        Aspect(kind="random", name="random state", text=f"call {random.call} of seed {random.seed}"),
    ]
    found += [Aspect(kind="size", name=f"the size of {path}", text=str(tuple(t.shape))) for path, t in inputs.items()]
    if gradients:
        held = module.parameters() if module.autopar.alike else ()
        flags = bytes(tensor.requires_grad for tensor in (*held, *inputs.values()))
        text = f"{sum(flags)} of {len(flags)} (set {zlib.crc32(flags):08x})"
        found.append(Aspect(kind="trained", name="the tensors that require a gradient", text=text))
    return found
