"""flax.linen in both directions: Linen modules within nnxlib models, and nnxlib Modules within Linen models.

Linen keeps its variables outside of its modules, in *collections*: ``{'params': {'Dense_0': {'kernel': ...}}}``. Here a
Module holds its Variables, and the *type* of a Variable is its collection (:func:`nnxlib.register_variable_name`). So
one and the same Variable stands at ``params/Dense_0/kernel`` there and at ``Dense_0/kernel`` here, and all that
:class:`ToNNX` and :class:`ToLinen` do is to carry values between the two places, and random keys to where the other
side draws them.

``nnxlib.bridge`` needs flax, the extra ``nnxlib[bridge]``, and is imported when it is first asked for.
"""

try:
    import flax.linen
except ImportError as error:
    raise ImportError(
        "nnxlib.bridge joins nnxlib with flax.linen, and flax is not installed: pip install 'nnxlib[bridge]'."
    ) from error

from ..nn import initializers as initializers
from . import interop as interop
from . import variables as variables
from . import wrappers as wrappers
from .functional import Functional as Functional
from .functional import functional as functional
from .module import AttrPriority as AttrPriority
from .module import Module as Module
from .module import Scope as Scope
from .module import compact as compact
from .module import current_context as current_context
from .module import current_module as current_module
from .module import linen_in_bridge_mdl as linen_in_bridge_mdl
from .module import nnx_in_bridge_mdl as nnx_in_bridge_mdl
from .to_linen import ToLinen as ToLinen
from .to_linen import to_linen as to_linen
from .to_linen import to_linen_class as to_linen_class
from .to_nnx import ToNNX as ToNNX
from .to_nnx import lazy_init as lazy_init
from .variables import NNXMeta as NNXMeta
from .variables import with_partitioning as with_partitioning
