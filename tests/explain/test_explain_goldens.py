"""Golden texts: the full explanation of a GPT-2 on (2, 4), and the answers to why and why not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autopar.explain import main
from tests.support.golden import Golden

TARGET = """
import torch
import transformers

def gpt2():
    config = transformers.GPT2Config(n_layer=12, n_embd=768, n_head=12, vocab_size=50304, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).bfloat16()
    model.loss_type = "ForCausalLM"
    tokens = torch.empty(16, 1024, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}
"""


@pytest.mark.parametrize(
    "name, asked",
    [
        ("explain_gpt2.txt", []),
        ("explain_gpt2_why.txt", ["--why", "*.mlp.c_fc", "--why", "*.mlp.c_fc.weight"]),
        ("explain_gpt2_why_not.txt", ["--why-not", "*.mlp.c_fc.weight=*, S(0)"]),
    ],
)
def test_the_explanation_reads_as_the_golden_one(
    name: str, asked: list[str], golden: Golden, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "build_gpt2.py"
    path.write_text(TARGET)
    assert main([f"{path}:gpt2", "--mesh", "dp=2,tp=4", "--device", "h100", *asked]) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 128 and line == line.rstrip() for line in text.splitlines())
    golden.check(name, re.sub(r"^planned in .*$", "planned in # s", text, flags=re.MULTILINE))
