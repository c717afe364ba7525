"""A model that returns its loss, "auto" in the config, checkpoints: as with Hugging Face models.

paceline train --script examples/deepspeed/language_model.py --nproc 2 -- --output_dir /tmp/lm
"""

import argparse
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

import paceline.compat.deepspeed as deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--max_steps", type=int, default=6)
parser.add_argument("--learning_rate", type=float, default=0.01)
parser.add_argument("--per_device_train_batch_size", type=int, default=2)
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
args = parser.parse_args()

ds_config = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.01}},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}
TEXT = b"the same run on any number of ranks, and on any layout. " * 20


class SmallLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.rnn = nn.GRU(16, 24, batch_first=True)
        self.lm_head = nn.Linear(24, 256)

    def forward(self, input_ids, labels):
        logits = self.lm_head(self.rnn(self.embed(input_ids))[0])
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


torch.manual_seed(0)
with deepspeed.zero.Init():
    model = SmallLM()
engine, *_ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(), config=ds_config
)
if args.resume:
    path, client_state = engine.load_checkpoint(args.output_dir)
    if engine.global_rank == 0:
        print(f"resumed at step {engine.global_steps}, epoch {client_state['epoch']}")
tokens = torch.tensor(list(TEXT))
engine.train()
while engine.global_steps < args.max_steps:
    first = (engine.micro_steps * engine.world_size + engine.global_rank) * 7
    rows = [tokens[first + i : first + i + 16] for i in range(args.per_device_train_batch_size)]
    input_ids = torch.stack(rows).to(engine.device)
    loss = engine(input_ids=input_ids, labels=input_ids).loss
    engine.backward(loss)
    engine.step()
    if engine.is_gradient_accumulation_boundary() and engine.global_rank == 0:
        print(f"step {engine.global_steps}: loss {loss.item():.5f}")
engine.save_checkpoint(args.output_dir, client_state={"epoch": 1})
engine.save_16bit_model(args.output_dir, "pytorch_model.bin")
