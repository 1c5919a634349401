"""Language models of transformers, from a folder or a hub id. Other rooms import from here alone.

`source` checks config.json. `objective` has the class of each objective, and a probe that finds a
model of another kind. `model` is the blueprint. It asks `stages`, `tensor_plan` and `experts` how its class is cut,
sharded and routed; `calls` keeps transformers from reading values. `conversion` fills the model from files, and
`folder_weights` reads and writes its folder under the model's names. `heads` has models with other output layers.
"""

from shardwise.model.hf.folder_weights import FolderWeights
from shardwise.model.hf.heads import ScoringModel, ValuingModel
from shardwise.model.hf.model import HuggingFaceModel
from shardwise.model.hf.objective import auto_class
from shardwise.model.hf.source import load_config

__all__ = [
    "FolderWeights",
    "HuggingFaceModel",
    "ScoringModel",
    "ValuingModel",
    "auto_class",
    "load_config",
]
