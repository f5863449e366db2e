"""Get and load optimizer state: name it by FQN, flatten, split, initialise.

The caller's dict is never changed.
"""

from torch_dcp_backport.state_dict.optim.flat import flatten_optim_state, unflatten_optim_state
from torch_dcp_backport.state_dict.optim.form import complaint_about
from torch_dcp_backport.state_dict.optim.get import get_optim_state
from torch_dcp_backport.state_dict.optim.initial import init_optim_state
from torch_dcp_backport.state_dict.optim.split import split_optim_state

__all__ = [
    "complaint_about",
    "flatten_optim_state",
    "get_optim_state",
    "init_optim_state",
    "split_optim_state",
    "unflatten_optim_state",
]
