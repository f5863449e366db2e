"""The insides of `torch_dcp_backport.checkpoint`: nothing outside that room imports from here."""
