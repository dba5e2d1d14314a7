"""Train a GPT-2 in pipeline stages on two ranks, each of which is fully sharded over four.

    torchrun --nproc-per-node 8 examples/pipeline.py

Every rank passes the whole batch and gets the loss, which is that of the model on one device.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import transformers

import autopar


def main() -> None:
    """Three steps of AdamW, in stages and whole."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=4, n_embd=64, n_head=4, vocab_size=256, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model, tokens = transformers.GPT2LMHeadModel(config), torch.randint(256, (32, 32))
    batch = {"input_ids": tokens, "labels": tokens}

    parallel = autopar.parallelize(model, batch, {"pp": 2, "dp": 4}, pipeline="pp", strategy="fsdp", microbatches=4)
    optimizer = torch.optim.AdamW(parallel.parameters())
    whole = torch.optim.AdamW(model.parameters())
    for step in range(3):
        loss = parallel.step(**batch)
        expected = model(**batch)["loss"]
        expected.backward()
        for one in (optimizer, whole):
            one.step()
            one.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {float(loss):.5f} in stages, {float(expected.detach()):.5f} whole")
    if dist.get_rank() == 0:
        print(parallel.autopar.plan)


if __name__ == "__main__":
    main()
