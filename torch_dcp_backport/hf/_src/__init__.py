"""The insides of `torch_dcp_backport.hf`: nothing outside that room imports from here."""
