"""Small models of libraries, and inputs to match: what `benchmarks/libraries.py` tries.

Nothing is downloaded; weights are random. Names are `library/model`; of timm there is one model of each of its modules, of
torchvision one of each family that makes no shapes of values (detectors do), of others those of `benchmarks.library_tables`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.library_tables import TABLES, made
from benchmarks.trials import NotBuilt

LARGEST = 30_000_000  # parameters
TORCHVISION = (
    "densenet121 efficientnet_v2_s googlenet maxvit_t mnasnet0_5 mobilenet_v3_small regnet_y_400mf resnet18 shufflenet_v2_x0_5 "
    "squeezenet1_0 swin_t swin_v2_t convnext_tiny fcn_resnet50 deeplabv3_mobilenet_v3_large lraspp_mobilenet_v3_large"
).split()


def names() -> list[str]:
    """What there is to try: of a library that is not installed nothing."""
    tabled = [f"{library}/{name}".strip("/") for library, rows in TABLES.items() for name in rows]
    timm = [f"timm/{module}" for module in sorted(set(_modules_of_timm().values()))] if _installed("timm") else []
    found = [*tabled, *(f"torchvision/{name}" for name in TORCHVISION), *timm]
    return [name for name in found if _installed(name.partition("/")[0])]


def built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model in train mode, and a sample; raises NotBuilt where it does not run."""
    library, _, model = name.partition("/")
    rows = {f"{table}/{row}".strip("/"): found for table, held in TABLES.items() for row, found in held.items()}
    torch.manual_seed(0)
    if library == "timm":
        return _of_timm(model)
    if library == "torchvision":
        sized = 224 if model == "maxvit_t" else 64
        backbone = {"weights_backbone": None} if "resnet50" in model or "mobilenet_v3_large" in model else {}
        module = made("torchvision.models.get_model", model, num_classes=10, **backbone)()
        return module.train(), {next(iter(inspect.signature(module.forward).parameters)): torch.randn(2, 3, sized, sized)}
    if name not in rows:
        raise NotBuilt("unknown")
    make, sample = rows[name]
    return make().train(), {argument: draw() for argument, draw in sample.items()}


def _installed(library: str) -> bool:
    """Whether a library is there; its models may have another name than itself."""
    try:
        found = importlib.util.find_spec({"pykan": "kan"}.get(library, library)) is not None
    except ImportError:
        return False
    if found and library in ("timm", "torchvision", "segmentation_models_pytorch"):
        _let_torchvision_load()
    return found


def _let_torchvision_load() -> None:
    """A build of torchvision for CUDA has no operators beside torch's for the CPU, and asks for two when it is imported."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    _LIBRARIES.append(library)
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_LIBRARIES: list[torch.library.Library] = []  # what they define is there as long as they are


def _modules_of_timm() -> Mapping[str, str]:
    """The module of each model."""
    _installed("timm")
    registry = importlib.import_module("timm.models._registry")
    found: Mapping[str, str] = registry._model_to_module
    return found


def _of_timm(module: str) -> tuple[nn.Module, dict[str, Any]]:
    """The smallest model of a module at the smallest size of pictures that runs."""
    timm, sized = importlib.import_module("timm"), []
    for name in (name for name, of in sorted(_modules_of_timm().items()) if of == module):
        with contextlib.suppress(Exception), torch.device("meta"):
            sized.append((sum(one.numel() for one in timm.create_model(name, num_classes=10).parameters()), name))
    for count, name in sorted(sized)[:3]:
        for options, size in itertools.product(({"img_size": 64}, {"img_size": 128}, {}), (64, 128, 0)):
            if count > LARGEST or options.get("img_size", size) != size:
                continue
            try:
                model = timm.create_model(name, num_classes=10, **options).train()
                size = size or model.default_cfg["input_size"][-1]
                x = torch.randn(2, 3, size, size)
                model(x)
            except Exception:
                continue
            return model, {"x": x}
    raise NotBuilt(f"of {len(sized)} models none runs")
