"""Containers and Sequential, under the name that flax.nnx has for them."""

from ..core.containers import Dict as Dict
from ..core.containers import List as List
from ..core.module import Sequential as Sequential
from ..training.train_state import TrainState as TrainState
