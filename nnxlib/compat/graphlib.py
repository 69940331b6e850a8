"""The functions on graphs, under the name that flax.nnx has for them."""

from ..core.contexts import MergeContext as MergeContext
from ..core.contexts import SplitContext as SplitContext
from ..core.contexts import UpdateContext as UpdateContext
from ..core.contexts import current_update_context as current_update_context
from ..core.contexts import merge_context as merge_context
from ..core.contexts import split_context as split_context
from ..core.contexts import update_context as update_context
from ..core.graphdef import GraphDef as GraphDef
from ..core.module import iter_module_children as iter_module_children
from ..core.ops import *  # noqa: F403
from ..core.state import FlatState as FlatState
from ..core.state import State as State
from ..core.state import map_state as map_state
from ..core.variables import Variable as Variable
from ..transforms.partials import cached_partial as cached_partial
