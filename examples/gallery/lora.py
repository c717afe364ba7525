"""LoRA fine-tuning with peft: a frozen base model, small trained adapters.

python lora.py
python lora.py --resume --steps 160                   # goes on where it ended
paceline train --script lora.py --nproc 2             # the same run on two ranks

Needs `pip install transformers peft`; downloads nothing.
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import paceline

LENGTH = 24


def sequences(step: int, count: int, seed: int) -> TensorDataset:
    """Numbers that go up by `step`, modulo 50: what a model of the next token can learn at once."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, 50, (count, 1), generator=generator)
    return TensorDataset((start + step * torch.arange(LENGTH)) % 50)


def language_loss(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
    (ids,) = batch
    return model(input_ids=ids, labels=ids).loss  # all rows are equally long: a mean over samples


def base_model(folder: Path, tiny: bool) -> nn.Module:
    """A base model that counts in steps of one. Yours: AutoModelForCausalLM.from_pretrained(…)."""
    config = GPT2Config(
        vocab_size=50, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    trainer = paceline.Trainer(
        model,
        forward=language_loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        global_batch=32,
        run_dir=folder,
        progress=False,
    )
    # Resumed, a base that is trained already has nothing left to do.
    trainer.fit(sequences(1, 640, seed=1), steps=3 if tiny else 120, resume=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--run-dir", default="runs/lora")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a few steps, to see that it works")
    options = parser.parse_args()
    folder = Path(options.run_dir)

    base = base_model(folder / "base", options.tiny)
    # The adapters are added to the base in place, whose own parameters are frozen by this. They
    # begin at random: the seed makes them the same on any number of ranks.
    torch.manual_seed(0)
    model = get_peft_model(
        base,
        LoraConfig(
            r=options.rank, lora_alpha=16, target_modules=["c_attn", "c_proj", "c_fc"],
            fan_in_fan_out=True,  # GPT-2 keeps its weights transposed
        ),
    )  # fmt: skip
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count, whole = sum(p.numel() for p in trained), sum(p.numel() for p in model.parameters())
    print(f"training {count:,} of {whole:,} parameters")

    test = sequences(3, 64, seed=3)
    trainer = paceline.Trainer(
        model,
        forward=language_loss,
        optimizer=torch.optim.AdamW(trained, lr=1e-2),  # state for the adapters alone
        global_batch=32,
        run_dir=folder / "adapters",
        checkpoint=paceline.Checkpointing(every=50),
    )
    before = trainer.evaluate(test)["loss"]
    steps = options.steps // 40 if options.tiny else options.steps
    trainer.fit(sequences(3, 640, seed=2), test, steps=steps, resume=options.resume)
    after = trainer.evaluate(test)["loss"]
    print(f"loss on steps of three: {before:.3f} before, {after:.3f} after")

    # The adapters alone, as a folder that peft and Hugging Face read. One rank writes it.
    if paceline.World.current().is_main:
        model.save_pretrained(folder / "adapter")
        with torch.no_grad():
            ids = torch.tensor([[5, 8, 11]])
            print("after 5 8 11:", model.generate(input_ids=ids, max_new_tokens=6)[0, 3:].tolist())


if __name__ == "__main__":
    main()
