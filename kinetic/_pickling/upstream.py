"""The private names of cloudpickle that kinetic uses. Only this module imports them.

`make test-cloudpickle` runs the tests of pickling with the oldest version that kinetic accepts.
Besides these names, `CodePickler` overrides two methods of `cloudpickle.Pickler` and reads one
attribute: `_dynamic_function_reduce`, `_function_getnewargs` and `globals_ref`.
"""

from __future__ import annotations

from cloudpickle import cloudpickle as _internals

MAKE_CLASS = "_make_skeleton_class"
MAKE_ENUM = "_make_skeleton_enum"
MAKE_FUNCTION = "_make_function"
SET_CLASS_STATE = "_class_setstate"
SET_FUNCTION_STATE = "_function_setstate"
FIND_BUILTIN_TYPE = "_builtin_type"

make_class = getattr(_internals, MAKE_CLASS)
make_enum = getattr(_internals, MAKE_ENUM)
make_function = getattr(_internals, MAKE_FUNCTION)
set_class_state = getattr(_internals, SET_CLASS_STATE)
set_function_state = getattr(_internals, SET_FUNCTION_STATE)
find_builtin_type = getattr(_internals, FIND_BUILTIN_TYPE)

make_module = _internals.dynamic_subimport
read_class_state = _internals._class_getstate
should_pickle_by_reference = _internals._should_pickle_by_reference
track_class = _internals._get_or_create_tracker_id
tracked_classes = _internals._DYNAMIC_CLASS_TRACKER_BY_CLASS
classes_by_tracker = _internals._DYNAMIC_CLASS_TRACKER_BY_ID
