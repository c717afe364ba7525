"""A Hugging Face model that returns its own loss needs no loss function.

Padding differs between the ranks here; the loss is still the mean over all labels of the global
batch, as it is on one process. Needs `pip install transformers`; downloads nothing.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import paceline

torch.manual_seed(0)
ids = torch.randint(1, 100, (64, 16))
lengths = torch.randint(4, 17, (64,))
mask = (torch.arange(16) < lengths[:, None]).long()
data = [
    {"input_ids": i, "attention_mask": m, "labels": i.masked_fill(m == 0, -100)}
    for i, m in zip(ids, mask, strict=True)
]
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=100, n_positions=16, n_embd=32, n_layer=2, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )
)  # fmt: skip
model.train()
trainer = paceline.Trainer(
    model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    global_batch=16,
)
print(trainer.fit(data, epochs=2))
