"""What a run is to do: a strict schema, loading with overrides, and checks before anything starts.

config = load("recipes/demo.yaml", ["train.steps=100"])    # ConfigError: all problems at once
problems = check(config)                                   # what several values break together
print(dump(resolve(config)))                               # "auto" made explicit, as YAML
"""

from paceline.config.checks import check
from paceline.config.code import became, code_folders, code_notes, config_notes, with_code
from paceline.config.devices import count_gpus
from paceline.config.loading import load, load_checked
from paceline.config.lr_schedule import lr_factor, scaled_lr
from paceline.config.resolving import dump, json_schema, learning_rate, resolve, summary
from paceline.config.running import Checkpoint, Launch, Mlflow, Track
from paceline.config.schema import Config
from paceline.config.target_sections import Target
from paceline.config.targets import import_target
from paceline.config.training import Batch, Data, Model, Optimizer, Schedule, Train
from paceline.credentials import Secret

__all__ = [
    "Batch",
    "Checkpoint",
    "Config",
    "Data",
    "Launch",
    "Mlflow",
    "Model",
    "Optimizer",
    "Schedule",
    "Secret",
    "Target",
    "Track",
    "Train",
    "became",
    "check",
    "code_folders",
    "code_notes",
    "config_notes",
    "count_gpus",
    "dump",
    "import_target",
    "json_schema",
    "learning_rate",
    "load",
    "load_checked",
    "lr_factor",
    "resolve",
    "scaled_lr",
    "summary",
    "with_code",
]
