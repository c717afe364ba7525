"""Lightning under torchrun, with its own ``ModelCheckpoint`` and ``ckpt_path="last"``."""

from __future__ import annotations

import logging
import warnings

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from recovering import task


class Module(lightning.LightningModule):
    """The task in Lightning's words."""

    def __init__(self) -> None:
        super().__init__()
        self.model = task.make_model()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """The loss of a batch."""
        return task.loss_of(self.model, batch)

    def configure_optimizers(self) -> task.NotingAdamW:
        """The optimizer that notes its steps."""
        return task.make_optimizer(self.model)


def main() -> None:
    """Train until killed; go on from the last checkpoint."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    saving = ModelCheckpoint(
        dirpath=task.folder(), every_n_train_steps=task.every(), save_last=True, save_top_k=1
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=task.STEPS,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(task.Tokens(), batch_size=task.GLOBAL_BATCH // trainer.world_size)
    trainer.fit(Module(), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
