import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

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
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=TrainingArguments(
        output_dir="out",
        # Each of two ranks reads 8 samples for a step.
        per_device_train_batch_size=8,
        train_sampling_strategy="sequential",
        num_train_epochs=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=dataset,
)
trainer.train()
for entry in trainer.state.log_history[:-1]:
    if trainer.is_world_process_zero():
        print(f"loss {float(entry['loss']):.6f}")
