"""Language models of transformers, from a folder or a hub id. Other rooms import from here alone.

source         finds the folder, and checks config.json
objective      causal, masked or seq2seq: the class of each, and a probe that finds a model of another kind
model          the blueprint
stages, tensor_plan, experts   what cuts into stages, tensor parallelism and mixtures of experts need of it
calls          calls that read no values
conversion, folder_weights     the model's tensors from files, and back
"""

from shardwise.model.hf.folder_weights import FolderWeights
from shardwise.model.hf.model import HuggingFaceModel
from shardwise.model.hf.objective import AUTO_CLASSES
from shardwise.model.hf.source import folder_of

__all__ = ["AUTO_CLASSES", "FolderWeights", "HuggingFaceModel", "folder_of"]
