import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import paceline

torch.manual_seed(0)
tokens = torch.randint(50, (64, 12))
labels = tokens.clone()
labels[:, 0] = -100  # nothing comes before the first token
dataset = [{"input_ids": tokens[i], "labels": labels[i]} for i in range(64)]

config = GPT2Config(
    vocab_size=50,
    n_positions=12,
    n_embd=16,
    n_layer=1,
    n_head=2,
    bos_token_id=0,
    eos_token_id=0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    resid_pdrop=0.0,
)
model = GPT2LMHeadModel(config)
trainer = paceline.Trainer(
    model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0),
    clip_norm=1.0,
)
# All ranks together read 16 samples for a step.
history = trainer.fit(DataLoader(dataset, batch_size=16), epochs=2)
for loss in history.losses:
    print(f"loss {loss:.6f}")
