"""The insides of `torch_dcp_backport.dist_checkpointing`: nothing outside that room imports from here."""
