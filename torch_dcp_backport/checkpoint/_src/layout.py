"""Names of folders in a manager's checkpoint, and keys of its common state."""

#: Objects: each rank's scheduler, where they differ; the common state has their number.
SCHEDULERS, SCHEDULERS_WORLD = "lr_schedulers", "lr_schedulers_world"
#: Common state: scheduler, number of ranks, contents, keys that are another key's tensor.
SCHEDULER, WORLD, SAVED, TIED = "lr_scheduler", "world", "contents", "tied"
#: Folders of adapters: ours, and that of verl's own workers, which write theirs after the checkpoint.
ADAPTER, VERL_ADAPTER = "adapter", "lora_adapter"
