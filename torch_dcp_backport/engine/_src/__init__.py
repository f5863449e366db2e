"""The insides of `torch_dcp_backport.engine`: nothing outside that room imports from here."""
