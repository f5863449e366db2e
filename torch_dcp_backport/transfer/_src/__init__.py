"""The insides of `torch_dcp_backport.transfer`: nothing outside that room imports from here."""
