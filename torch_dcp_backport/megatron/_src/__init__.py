"""The insides of `torch_dcp_backport.megatron`: nothing outside that room imports from here."""
