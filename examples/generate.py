"""Generate with a language model that no process holds whole, and compare with the library's own tokens.

    torchrun --nproc-per-node 4 examples/generate.py                      Llama, heads and weights over all processes
    torchrun --nproc-per-node 4 examples/generate.py --model t5           GPT-2, Llama or T5
    torchrun --nproc-per-node 4 examples/generate.py --strategy auto

The model is small and its weights are random. Prefill and decode are two programs over one set of stored weights and one cache.
Exit code 1 if a token differs.
"""

from __future__ import annotations

import argparse
import os

import torch
import transformers

from autopar.integrations.generation import CachedGenerator, parallel_generator
from autopar.runtime.storage import to_local

BATCH, PROMPT, LENGTH, WORDS = 4, 16, 64, 256
WIDTH, HEADS, LAYERS = 64, 4, 2


def whole_model(name: str) -> transformers.PreTrainedModel:
    """A small model with random weights, so large that it says many different words."""
    words = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=WIDTH, n_head=HEADS, n_layer=LAYERS, n_positions=LENGTH, **words)
    elif name == "llama":
        sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
        config = transformers.LlamaConfig(num_attention_heads=HEADS, **sizes, **words)
    else:
        sizes = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 4 * WIDTH, "num_layers": LAYERS, "num_heads": HEADS}
        config = transformers.T5Config(decoder_start_token_id=0, **sizes, **words)
    kind = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    model = kind.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def stored(generator: CachedGenerator) -> str:
    """How many bytes of weights and cache this process stores, and whether both programs have the same."""
    parts = []
    for kind, first, second in (
        ("weights", generator.prefill.named_parameters(), generator.decode.named_parameters()),
        ("cache and other buffers", generator.prefill.named_buffers(), generator.decode.named_buffers()),
    ):
        own, other = ({name: to_local(tensor) for name, tensor in held} for held in (first, second))
        once = all(own[name].data_ptr() == other[name].data_ptr() for name in own)
        bytes_ = sum(tensor.nbytes for tensor in own.values())
        parts.append(f"{bytes_:,} bytes of {kind}, {'stored once' if once else 'stored twice'}")
    return "; ".join(parts)


def main() -> None:
    """Generate on this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt2", "llama", "t5"), default="llama")
    parser.add_argument("--strategy", default="megatron")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model, prompts = whole_model(options.model), torch.randint(2, WORDS, (BATCH, PROMPT))
    mesh = (int(os.environ.get("WORLD_SIZE", "1")),)
    generator = parallel_generator(model, prompts, mesh, length=LENGTH, device="h100", strategy=options.strategy)
    ours, theirs = (one.generate(prompts, max_new_tokens=24, do_sample=False) for one in (generator, model))
    if int(os.environ.get("RANK", "0")) == 0:
        print(generator.plan)
        print(stored(generator))
        print(f"the tokens are those of the whole model: {torch.equal(ours, theirs)}")
        print(*ours[0].tolist())
    if not torch.equal(ours, theirs):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
