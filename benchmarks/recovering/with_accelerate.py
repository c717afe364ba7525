"""Accelerate under torchrun, with its own ``save_state`` and ``load_state``."""

from __future__ import annotations

from pathlib import Path

from accelerate import Accelerator, skip_first_batches
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader

from recovering import task


def main() -> None:
    """Train until killed; go on from the latest state."""
    project = ProjectConfiguration(
        project_dir=task.folder(), automatic_checkpoint_naming=True, total_limit=2
    )
    accelerator = Accelerator(cpu=True, project_config=project)
    model = task.make_model()
    loader = DataLoader(task.Tokens(), batch_size=task.GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, task.make_optimizer(model), loader)
    step = 0
    saved = sorted(Path(task.folder(), "checkpoints").glob("checkpoint_*"))
    if saved:
        accelerator.load_state()
        first = next(iter(model.parameters()))
        step = int(optimizer.optimizer.state[first]["step"])
        project.iteration = step // task.every()
    batches = skip_first_batches(loader, step % len(loader))
    while step < task.STEPS:
        for batch in batches:
            optimizer.zero_grad()
            accelerator.backward(task.loss_of(model, batch))
            optimizer.step()
            step += 1
            if step % task.every() == 0:
                accelerator.save_state()
        batches = loader


if __name__ == "__main__":
    main()
