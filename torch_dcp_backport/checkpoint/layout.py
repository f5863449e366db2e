"""The names of what a manager's folder has in it."""

#: The sharded checkpoint, and what opens a model with transformers.
SHARDED, HUGGING_FACE = "dist_ckpt", "huggingface"
#: Common state: scheduler, number of ranks, contents, keys that are another key's tensor.
SCHEDULER, WORLD, SAVED, TIED = "lr_scheduler", "world", "contents", "tied"
