"""nnxlib: mutable Python modules for JAX, as fast as raw JAX.

    import nnxlib as nnx

Write plain objects (:class:`Module` with :class:`Param` in it), wrap a training step in :func:`jit`, differentiate with
:func:`grad`, and take a model apart with :func:`split` and together with :func:`merge`.
"""

import importlib as _importlib
import typing as _typing

from . import compat as compat
from .core import errors as errors
from .core.containers import Dict as Dict
from .core.containers import List as List
from .core.data import Data as Data
from .core.data import Static as Static
from .core.data import check_pytree as check_pytree
from .core.data import data as data
from .core.data import has_data as has_data
from .core.data import is_data as is_data
from .core.data import register_data_type as register_data_type
from .core.data import static as static
from .core.errors import TraceContextError as TraceContextError
from .core.filters import All as All
from .core.filters import Any as Any
from .core.filters import Everything as Everything
from .core.filters import Not as Not
from .core.filters import Nothing as Nothing
from .core.filters import OfType as OfType
from .core.filters import PathContains as PathContains
from .core.filters import WithTag as WithTag
from .core.graphdef import GraphDef as GraphDef
from .core.graphstate import GraphState as GraphState
from .core.iteration import find_duplicates as find_duplicates
from .core.iteration import iter_children as iter_children
from .core.iteration import iter_graph as iter_graph
from .core.iteration import recursive_map as recursive_map
from .core.iteration import set_metadata as set_metadata
from .core.metadata import VariableMetadata as VariableMetadata
from .core.metadata import with_metadata as with_metadata
from .core.metadata import with_partitioning as with_partitioning
from .core.module import M as M
from .core.module import Module as Module
from .core.module import iter_module_children as iter_module_children
from .core.module import iter_modules as iter_modules
from .core.module import view as view
from .core.module import view_info as view_info
from .core.module import with_attributes as with_attributes
from .core.objects import Object as Object
from .core.objects import Pytree as Pytree
from .core.objects import dataclass as dataclass
from .core.ops import PureState as PureState
from .core.ops import as_pure as as_pure
from .core.ops import call as call
from .core.ops import clone as clone
from .core.ops import flatten as flatten
from .core.ops import graphdef as graphdef
from .core.ops import map as map
from .core.ops import merge as merge
from .core.ops import pure as pure
from .core.ops import split as split
from .core.ops import state as state
from .core.ops import unflatten as unflatten
from .core.ops import unpack as unpack
from .core.ops import update as update
from .core.ops import variables as variables
from .core.paths import current_path as current_path
from .core.paths import path_of as path_of
from .core.rngs import Rngs as Rngs
from .core.rngs import RngStream as RngStream
from .core.scopes import use_name_scopes as use_name_scopes
from .core.state import FlatState as FlatState
from .core.state import State as State
from .core.state import filter_state as filter_state
from .core.state import from_flat_state as from_flat_state
from .core.state import map_state as map_state
from .core.state import merge_state as merge_state
from .core.state import replace_by_pure_dict as replace_by_pure_dict
from .core.state import restore_int_paths as restore_int_paths
from .core.state import split_state as split_state
from .core.state import to_flat_state as to_flat_state
from .core.state import to_pure_dict as to_pure_dict
from .core.variable_names import register_variable_name as register_variable_name
from .core.variable_names import variable_name_from_type as variable_name_from_type
from .core.variable_names import variable_type_from_name as variable_type_from_name
from .core.variables import A as A
from .core.variables import BatchStat as BatchStat
from .core.variables import Cache as Cache
from .core.variables import Intermediate as Intermediate
from .core.variables import Param as Param
from .core.variables import Perturbation as Perturbation
from .core.variables import RngCount as RngCount
from .core.variables import RngKey as RngKey
from .core.variables import RngState as RngState
from .core.variables import Variable as Variable
from .core.variables import VariableState as VariableState
from .nn import initializers as initializers
from .nn.activations import PReLU as PReLU
from .nn.activations import celu as celu
from .nn.activations import elu as elu
from .nn.activations import gelu as gelu
from .nn.activations import glu as glu
from .nn.activations import hard_sigmoid as hard_sigmoid
from .nn.activations import hard_silu as hard_silu
from .nn.activations import hard_swish as hard_swish
from .nn.activations import hard_tanh as hard_tanh
from .nn.activations import identity as identity
from .nn.activations import leaky_relu as leaky_relu
from .nn.activations import log_sigmoid as log_sigmoid
from .nn.activations import log_softmax as log_softmax
from .nn.activations import logsumexp as logsumexp
from .nn.activations import one_hot as one_hot
from .nn.activations import relu as relu
from .nn.activations import relu6 as relu6
from .nn.activations import selu as selu
from .nn.activations import sigmoid as sigmoid
from .nn.activations import silu as silu
from .nn.activations import soft_sign as soft_sign
from .nn.activations import softmax as softmax
from .nn.activations import softplus as softplus
from .nn.activations import standardize as standardize
from .nn.activations import swish as swish
from .nn.activations import tanh as tanh
from .nn.initializers import Initializer as Initializer
from .nn.linear import Einsum as Einsum
from .nn.linear import Embed as Embed
from .nn.linear import Linear as Linear
from .nn.linear import LinearGeneral as LinearGeneral
from .nn.sequential import Sequential as Sequential
from .nn.stochastic import Dropout as Dropout
from .training import optimizer as optimizer
from .training.optimizer import ModelAndOptimizer as ModelAndOptimizer
from .training.optimizer import OptArray as OptArray
from .training.optimizer import Optimizer as Optimizer
from .training.optimizer import OptState as OptState
from .training.optimizer import OptVariable as OptVariable
from .transforms.abstract import eval_shape as eval_shape
from .transforms.axes import PARTITION_NAME as PARTITION_NAME
from .transforms.grad import grad as grad
from .transforms.grad import value_and_grad as value_and_grad
from .transforms.jit import jit as jit
from .transforms.lift import lift as lift
from .transforms.prefixes import StateAxes as StateAxes
from .transforms.prefixes import StateSharding as StateSharding
from .transforms.prefixes import prefix as prefix
from .transforms.tangents import DiffState as DiffState

__version__ = "0.1.0"

if _typing.TYPE_CHECKING:
    from . import bridge as bridge
    from . import sharding as sharding
    from .bridge import wrappers as wrappers
    from .compat import filterlib as filterlib
    from .compat import graphlib as graphlib
    from .compat import helpers as helpers
    from .compat import ids as ids
    from .compat import module as module
    from .compat import proxy_caller as proxy_caller
    from .compat import pytreelib as pytreelib
    from .compat import reprlib as reprlib
    from .compat import rnglib as rnglib
    from .compat import spmd as spmd
    from .compat import statelib as statelib
    from .compat import summary as summary
    from .compat import tracers as tracers
    from .compat import variablelib as variablelib
    from .compat import visualization as visualization
    from .core import traversals as traversals
    from .core.contexts import MergeContext as MergeContext
    from .core.contexts import SplitContext as SplitContext
    from .core.contexts import UpdateContext as UpdateContext
    from .core.contexts import current_update_context as current_update_context
    from .core.contexts import merge_context as merge_context
    from .core.contexts import split_context as split_context
    from .core.contexts import update_context as update_context
    from .core.pop import pop as pop
    from .core.reseeding import fork_rngs as fork_rngs
    from .core.reseeding import reseed as reseed
    from .core.reseeding import restore_rngs as restore_rngs
    from .core.reseeding import split_rngs as split_rngs
    from .core.reseeding import with_rngs as with_rngs
    from .inspection.diff import Diff as Diff
    from .inspection.diff import Difference as Difference
    from .inspection.diff import diff as diff
    from .inspection.display import display as display
    from .inspection.picture import draw as draw
    from .inspection.statistics import Statistics as Statistics
    from .inspection.statistics import ValueStatistics as ValueStatistics
    from .inspection.statistics import statistics as statistics
    from .inspection.tabulate import tabulate as tabulate
    from .nn.attention import MultiHeadAttention as MultiHeadAttention
    from .nn.attention import dot_product_attention as dot_product_attention
    from .nn.attention import dot_product_attention_with_rope as dot_product_attention_with_rope
    from .nn.conv import Conv as Conv
    from .nn.conv import ConvTranspose as ConvTranspose
    from .nn.lora import LoRA as LoRA
    from .nn.lora import LoRALinear as LoRALinear
    from .nn.lora import LoRALinearGeneral as LoRALinearGeneral
    from .nn.lora import LoRAParam as LoRAParam
    from .nn.lora import add_lora as add_lora
    from .nn.lora import merge_lora as merge_lora
    from .nn.masks import combine_masks as combine_masks
    from .nn.masks import make_attention_mask as make_attention_mask
    from .nn.masks import make_causal_mask as make_causal_mask
    from .nn.norm import BatchNorm as BatchNorm
    from .nn.norm import GroupNorm as GroupNorm
    from .nn.norm import InstanceNorm as InstanceNorm
    from .nn.norm import LayerNorm as LayerNorm
    from .nn.norm import RMSNorm as RMSNorm
    from .nn.pooling import avg_pool as avg_pool
    from .nn.pooling import max_pool as max_pool
    from .nn.pooling import min_pool as min_pool
    from .nn.pooling import pool as pool
    from .nn.recurrent import RNN as RNN
    from .nn.recurrent import Bidirectional as Bidirectional
    from .nn.recurrent import GRUCell as GRUCell
    from .nn.recurrent import LSTMCell as LSTMCell
    from .nn.recurrent import OptimizedLSTMCell as OptimizedLSTMCell
    from .nn.recurrent import RNNCellBase as RNNCellBase
    from .nn.recurrent import SimpleCell as SimpleCell
    from .nn.reparametrised import SpectralNorm as SpectralNorm
    from .nn.reparametrised import WeightNorm as WeightNorm
    from .nn.rotary import RoPE as RoPE
    from .nn.stack import Stack as Stack
    from .sharding import abstract_with_sharding as abstract_with_sharding
    from .sharding import as_abstract as as_abstract
    from .sharding import get_abstract_model as get_abstract_model
    from .sharding import get_named_sharding as get_named_sharding
    from .sharding import get_partition_spec as get_partition_spec
    from .sharding import logical_axis_rules as logical_axis_rules
    from .sharding import use_eager_sharding as use_eager_sharding
    from .sharding import using_eager_sharding as using_eager_sharding
    from .training import metrics as metrics
    from .training.ema import EMA as EMA
    from .training.metrics import Metric as Metric
    from .training.metrics import MultiMetric as MultiMetric
    from .training.train_state import TrainState as TrainState
    from .transforms import extract as extract
    from .transforms.branch import cond as cond
    from .transforms.branch import switch as switch
    from .transforms.capture import capture as capture
    from .transforms.checkify import checkify as checkify
    from .transforms.custom import custom_jvp as custom_jvp
    from .transforms.custom import custom_vjp as custom_vjp
    from .transforms.extract import NodeStates as NodeStates
    from .transforms.extract import from_tree as from_tree
    from .transforms.extract import merge_inputs as merge_inputs
    from .transforms.extract import split_inputs as split_inputs
    from .transforms.extract import to_tree as to_tree
    from .transforms.functional import functional as functional
    from .transforms.general import make_jaxpr as make_jaxpr
    from .transforms.general import named_call as named_call
    from .transforms.jacobian import hessian as hessian
    from .transforms.jacobian import jacfwd as jacfwd
    from .transforms.jacobian import jacobian as jacobian
    from .transforms.jacobian import jacrev as jacrev
    from .transforms.loops import fori_loop as fori_loop
    from .transforms.loops import while_loop as while_loop
    from .transforms.map_variables import map_variables as map_variables
    from .transforms.metadata import add_metadata_axis as add_metadata_axis
    from .transforms.metadata import transform_metadata as transform_metadata
    from .transforms.partials import cached_partial as cached_partial
    from .transforms.partials import jit_partial as jit_partial
    from .transforms.remat import checkpoint as checkpoint
    from .transforms.remat import remat as remat
    from .transforms.remat_scan import remat_scan as remat_scan
    from .transforms.scan import Carry as Carry
    from .transforms.scan import scan as scan
    from .transforms.shard import shard_map as shard_map
    from .transforms.vjp import fwd_and_bwd as fwd_and_bwd
    from .transforms.vjp import jvp as jvp
    from .transforms.vjp import linearize as linearize
    from .transforms.vjp import vjp as vjp
    from .transforms.vmap import pmap as pmap
    from .transforms.vmap import vmap as vmap

    graph = graphlib  # an import under another name is not exported
    object = pytreelib
else:
    _LATER_IN = {  # not all programs use these: each is imported when it is first asked for
        ".inspection.diff": "Diff Difference diff",
        ".inspection.statistics": "Statistics ValueStatistics statistics",
        ".core.contexts": (
            "merge_context split_context update_context current_update_context MergeContext SplitContext UpdateContext"
        ),
        ".core.reseeding": "fork_rngs reseed restore_rngs split_rngs with_rngs",
        ".core.pop": "pop",
        ".sharding": (
            "abstract_with_sharding as_abstract get_abstract_model get_named_sharding get_partition_spec "
            "logical_axis_rules use_eager_sharding using_eager_sharding"
        ),
        ".transforms.capture": "capture",
        ".transforms.remat": "checkpoint remat",
        ".transforms.extract": "NodeStates from_tree merge_inputs split_inputs to_tree",
        ".transforms.branch": "cond switch",
        ".transforms.loops": "fori_loop while_loop",
        ".transforms.scan": "Carry scan",
        ".transforms.vmap": "pmap vmap",
        ".transforms.checkify": "checkify",
        ".transforms.general": "make_jaxpr named_call",
        ".transforms.partials": "cached_partial jit_partial",
        ".transforms.metadata": "add_metadata_axis transform_metadata",
        ".transforms.custom": "custom_jvp custom_vjp",
        ".transforms.vjp": "fwd_and_bwd jvp linearize vjp",
        ".transforms.jacobian": "hessian jacfwd jacobian jacrev",
        ".transforms.map_variables": "map_variables",
        ".transforms.remat_scan": "remat_scan",
        ".transforms.shard": "shard_map",
        ".nn.conv": "Conv ConvTranspose",
        ".nn.norm": "BatchNorm GroupNorm InstanceNorm LayerNorm RMSNorm",
        ".nn.attention": "dot_product_attention dot_product_attention_with_rope MultiHeadAttention",
        ".nn.masks": "combine_masks make_attention_mask make_causal_mask",
        ".nn.rotary": "RoPE",
        ".nn.pooling": "avg_pool max_pool min_pool pool",
        ".nn.stack": "Stack",
        ".nn.recurrent": "RNN Bidirectional GRUCell LSTMCell OptimizedLSTMCell RNNCellBase SimpleCell",
        ".nn.lora": "LoRA LoRALinear LoRALinearGeneral LoRAParam add_lora merge_lora",
        ".training.metrics": "Metric MultiMetric",
        ".training.ema": "EMA",
        ".nn.reparametrised": "SpectralNorm WeightNorm",
        ".training.train_state": "TrainState",
        ".transforms.functional": "functional",
        ".inspection.display": "display",
        ".inspection.picture": "draw",
        ".inspection.tabulate": "tabulate",
    }
    _LATER = {name: module for module, names in _LATER_IN.items() for name in names.split()}
    # The bridge needs flax, and takes as long to import as flax does.
    _MODULES = {"bridge", "sharding", *compat.ALIASES}
    __all__ = [*(name for name in globals() if not name.startswith("_")), *_LATER, "metrics"]
    _REMEDIES = {  # for names that flax.nnx has, or had in an earlier version, and names of other libraries
        "nnxlib has one mode; code that sets others imports it from nnxlib.compat.flax": (
            "set_graph_mode set_graph_updates var_defaults vars_as with_vars"
        ),
        **{f"use nnx.{name.lower()}": name for name in "Cond Pmap Remat Scan".split()},
        "use nnx.Linear": "Dense",
        "use nnx.LinearGeneral": "DenseGeneral",
        "use nnx.Embed": "Embedding",
        "use nnx.Conv": "Conv1d Conv2d Conv3d",
        "use nnx.ConvTranspose": "ConvTranspose1d ConvTranspose2d ConvTranspose3d",
        "use nnx.BatchNorm": "BatchNorm1d BatchNorm2d BatchNorm3d",
        "use nnx.max_pool": "MaxPool1d MaxPool2d MaxPool3d",
        "use nnx.avg_pool": "AvgPool1d AvgPool2d AvgPool3d",
        "use nnx.MultiHeadAttention": "MultiheadAttention MultiHeadDotProductAttention SelfAttention",
        "use nnx.RNN(nnx.LSTMCell(...))": "LSTM",
        "use nnx.RNN(nnx.GRUCell(...))": "GRU",
        "use nnx.List": "ModuleList Sequence",
        "use nnx.Dict": "ModuleDict",
        "use nnx.Param": "Parameter",
        "use the function nnx.identity": "Identity",
        "use jax.numpy.reshape": "Flatten",
        "use nnx.functional(Model, ...), which has init and apply": "init apply",
        "use optax, as in nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)": "optim",
        "use nnx.bridge.lazy_init, for a Linen module": "lazy_init",
        "use a constructor: layers are made in __init__": "compact",
        "use a stream of nnx.Rngs: rngs.dropout()": "make_rng next_rng_key PRNGSequence",
        "use nnx.state, and Orbax or NumPy: docs/training.md": (
            "save load save_checkpoint restore_checkpoint tree_serialise_leaves tree_deserialise_leaves"
        ),
        "use nnx.jit": "JIT Jit filter_jit",
        "use nnx.grad": "Grad filter_grad",
        "use nnx.value_and_grad": "filter_value_and_grad",
        "use nnx.vmap": "Vmap filter_vmap",
        "use nnx.split and nnx.merge, with filters": "partition combine is_array is_inexact_array",
        "use an assignment: model.layer.kernel.value = array": "tree_at",
        "use nnx.Optimizer": "apply_updates",
        "use model.train() and model.eval()": "train_mode eval_mode inference_mode",
        "use nothing, for gradients are computed only where nnx.grad asks for them": "no_grad",
        "use nnx.with_partitioning": "with_logical_partitioning",
        "use nnx.split, which gives a pure function its arguments": "transform transform_with_state",
        "use a Variable in an attribute": "get_parameter get_state set_state",
        **{f"use the function nnx.{name.lower()}": name for name in "ELU GELU ReLU SiLU Sigmoid Softmax Tanh".split()},
        "use a loss of optax, such as optax.l2_loss": (
            "MSELoss L1Loss CrossEntropyLoss BCEWithLogitsLoss softmax_cross_entropy cross_entropy"
        ),
        "use nnx.fork_rngs or nnx.split_rngs": "fork ForkStates",
        "use nnx.view": "set_mode",
        "use nnx.view_info": "set_mode_info",
        "give Variables ref=True": "use_refs using_refs to_refs as_ref_vars use_mutable_arrays using_mutable_arrays",
        "leave it out, and compile with nnx.jit what changes a Module": (
            "use_hijax using_hijax to_hijax to_lojax mutable freeze"
        ),
        "leave it out: jax.grad and nnx.jit take a Module or a State as it is": (
            "as_immutable_vars as_mutable_vars as_hijax_vars as_pytree_vars as_array_vars to_arrays"
        ),
        "use jax.new_ref": "array_ref mutable_array",
        "use jax.Ref, as in isinstance(x, jax.Ref)": "ArrayRef MutableArray is_array_ref is_mutable_array",
        "use nnx.is_data": "is_data_type",
        "use nnx.register_variable_name": "register_variable_name_type_pair",
        "jax.lax.with_sharding_constraint takes a State": "with_sharding_constraint",
    }
    _INSTEAD = {name: remedy for remedy, names in _REMEDIES.items() for name in names.split()}

    def __getattr__(name: str):
        if name in _LATER:
            found = getattr(_importlib.import_module(_LATER[name], __name__), name)
            globals()[name] = found
            return found
        if name in _MODULES:
            return _importlib.import_module(f".{name}", __name__)
        remedy = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{remedy}")

    def __dir__():
        return sorted({*globals(), *_LATER, *_MODULES})
