"""The tests that PyTorch has for torch.distributed.checkpoint, and what of ours is for the same promise.

Names alone: no line of them is here. report.py makes docs/upstream-tests.md of this table and of the records.
"""

from __future__ import annotations

import fnmatch
from typing import NamedTuple

from scenario import all_scenarios

RELEASE, MAIN, BOTH = "2.6.0", "main", "both"


class Upstream(NamedTuple):
    """One test of PyTorch's."""

    name: str
    #: Where it is: RELEASE, MAIN or BOTH.
    where: str
    #: fnmatch patterns of scenario keys; brackets stand for themselves.
    scenarios: tuple[str, ...] = ()
    #: Tests outside tests/conformance, as pytest names them.
    tests: tuple[str, ...] = ()
    #: What of it is not this package's, and why.
    not_ours: str = ""

    @property
    def keys(self) -> list[str]:
        """The scenarios that its patterns match, in the order of the table of scenarios."""
        patterns = [pattern.replace("[", "[[]") for pattern in self.scenarios]

        def is_meant(key: str) -> bool:
            # A last blank with a star stands for any arguments, and for none.
            return any(fnmatch.fnmatchcase(name, one) for name in (key, f"{key} ") for one in patterns)

        return [key for key in all_scenarios() if is_meant(key)]


def each_way(kind: str) -> tuple[str, ...]:
    """Model and optimizer, there and back, in one wrapper."""
    ways = (
        "get model/get",
        "set model/load_own",
        "set model/load_full",
        "get optimizer/get",
        "set optimizer/load",
    )
    return tuple(f"{way} {kind} *" for way in ways)


FULL = "full_state_dict"
BROADCAST = f"{FULL}+broadcast_from_rank0"
LAYOUTS = ("dcp/another_layout *",)
OBJECTS = ("dcp/tensors_and_objects*",)
HELPER = "a private helper of torch's planner, which this package leaves as it is"
INDEX = "torch's class for keys in an index, which this package leaves as it is"
CACHE = "torch >= 2.7 keeps plans (enable_plan_caching); 2.4 to 2.6 have no such option"
EXTENSION = "torch >= 2.7 has extensions of its file format; 2.4 to 2.6 have no such option"
STREAM = "how often torch's own writer flushes a stream"
HF = "torch 2.4 to 2.6 have no such storage; the room `hf` reads and writes these files"
BROADCASTS = (
    f"set model/load_full fsdp2 {BROADCAST}*",
    f"set model/load_full fsdp1 {BROADCAST}*",
    f"set optimizer/load fsdp2 {BROADCAST}*",
    f"set optimizer/load fsdp1 {BROADCAST}*",
    f"set model, other keys/load_keys fsdp2 missing {BROADCAST}",
)
HYBRID = (f"set model/load_full fsdp1-hsdp {BROADCAST}*", f"set optimizer/load fsdp1-hsdp {BROADCAST}*")
TIED = tuple(
    f"{way}_tied *" for way in ("get model/get", "set model/load", "get optimizer/get", "set optimizer/load")
)
SUBMODULES = ("get model/get_submodules *", "deprecated/modules_as_keys *")
MODES = "FSDP1's own state_dict_type() warns; none of these functions does"

#: File below test/distributed/checkpoint -> its tests.
UPSTREAM: dict[str, tuple[Upstream, ...]] = {
    "test_state_dict.py": (
        Upstream("test_fsdp", BOTH, each_way("fsdp1")),
        Upstream("test_compiled_fsdp", BOTH, each_way("compile(fsdp1)")),
        Upstream("test_fsdp2", BOTH, each_way("fsdp2") + each_way("compile(fsdp2)")),
        Upstream("test_ddp", BOTH, each_way("ddp") + each_way("replicate")),
        Upstream("test_fsdp_ddp", BOTH, (*each_way("fsdp1"), "dcp, programs/ddp_inside_fsdp1 *")),
        Upstream("test_single_gpu", BOTH, each_way("plain")),
        Upstream("test_strict", BOTH, ("set model, other keys/load_keys *",)),
        Upstream(
            "test_cpu_offload_full_state_dict",
            BOTH,
            ("get model/get fsdp1 *", "get optimizer/get fsdp1 *"),
        ),
        Upstream("test_activation_ckpt_fqns_ddp", BOTH, ("get model/get ddp(ckpt) *",)),
        Upstream("test_activation_ckpt_fqns_fsdp1", BOTH, ("get model/get fsdp1(ckpt) *",)),
        Upstream("test_extra_state", BOTH, ("extra state/*",)),
        Upstream("test_non_persistent_buffers", BOTH, ("get model/get ddp *", "set model/load_own ddp")),
        Upstream("test_broadcast_from_rank0", BOTH, (*BROADCASTS, *HYBRID)),
        Upstream("test_broadcast_from_rank0_hsdp", RELEASE, HYBRID),
        Upstream(
            "test_fsdp_root_not_initialized",
            BOTH,
            ("get model/get fsdp1 -", "get optimizer/get fsdp1 *"),
        ),
        Upstream(
            "test_optim_state_dict_param_matching",
            BOTH,
            ("set optimizer/load_before_scheduler *", "set optimizer/load_scheduled *"),
        ),
        Upstream(
            "test_flattened_osd",
            BOTH,
            (
                "set optimizer/load * flatten_optimizer_state_dict*",
                "get optimizer/get * flatten_optimizer_state_dict*",
            ),
        ),
        Upstream("test_deprecate_partial", RELEASE, SUBMODULES),
        Upstream("test_deprecate_fsdp_api", RELEASE, ("get model/get fsdp1 *",), not_ours=MODES),
        Upstream("test_deprecate_api", MAIN, SUBMODULES, not_ours=MODES),
        Upstream("test_shared_weight", BOTH, TIED),
        Upstream("test_setting_meta_device_model", BOTH, (f"set model/load_meta * {FULL}",)),
        Upstream(
            "test_setting_meta_device_model_broadcasting", RELEASE, (f"set model/load_meta * {BROADCAST}*",)
        ),
        Upstream(
            "test_setting_meta_device_model_broadcasting_and_memory",
            MAIN,
            (f"set model/load_meta * {BROADCAST}*",),
            ("torch_dcp_backport/regression/test_out_of_memory.py::test_a_shard_and_a_margin_are_enough",),
        ),
        Upstream(
            "test_set_cpu_model_state_dict_broadcast_from_rank0",
            MAIN,
            (f"set model/load_full plain {BROADCAST}*", f"set model/load_full ddp {BROADCAST}*"),
        ),
        Upstream(
            "test_multi_device_load_model_state_dict",
            MAIN,
            ("set model/load_lora *",),
            not_ours="its other half, two real devices in one model, needs an accelerator",
        ),
        Upstream("test_state_dict_with_hook_on_keys", MAIN, ("renamed/load_renamed *", "hooks/hook_adds *")),
        Upstream(
            "test_multi_param_groups",
            MAIN,
            ("get optimizer, groups/get_groups *", "set optimizer, groups/load_groups *"),
        ),
        Upstream("test_no_dist", BOTH, ("one value/plain_process *",)),
    ),
    "test_state_dict_utils.py": (
        Upstream("test_gather_state_dict_dtensor", BOTH, ("helpers/gather -",)),
        Upstream(
            "test_gather_with_cpu_and_ranks_only",
            BOTH,
            ("helpers/gather cpu_offload", "helpers/gather ranks*"),
        ),
        Upstream("test_cpu_and_ranks_only", BOTH, ("helpers/offload *",)),
        Upstream("test_complicated_dict", BOTH, ("helpers/gather *",)),
        Upstream(
            "test_create_cpu_state_dict",
            BOTH,
            ("helpers/staged*",),
            ("tests/ranks/test_helpers.py::test_shared_and_pinned_memory_is_given_back",),
        ),
        Upstream("test_state_dict_util_distribute_tensors", BOTH, ("helpers/distribute",)),
        Upstream(
            "test_cpu_offload_for_dtensor",
            MAIN,
            ("helpers/staged*",),
            ("tests/ranks/test_helpers.py::test_an_offloaded_copy_is_not_the_live_state",),
        ),
    ),
    "test_planner.py": (
        Upstream("test_local_plan", BOTH, (*OBJECTS, *LAYOUTS)),
        Upstream("test_global_plan", BOTH, (*OBJECTS, *LAYOUTS)),
        Upstream("test_local_load_plan", BOTH, (*OBJECTS, *LAYOUTS)),
        Upstream("test_load_with_resharding", BOTH, ("dcp/another_number_of_ranks *",)),
        Upstream("test_load_with_world_size_diff_by_one", BOTH, ("dcp/another_number_of_ranks *",)),
        Upstream("test_create_read_item_from_chunks", BOTH, LAYOUTS),
        Upstream("test_strict", BOTH, ("dcp/key_that_is_not_saved *",)),
        Upstream("test_load_different_sizes_throws", BOTH, ("dcp/another_shape*",)),
        Upstream(
            "test_dedup_plans",
            MAIN,
            LAYOUTS,
            ("tests/dist_checkpointing/test_counters.py::test_replicas_are_written_once_by_all_alike",),
        ),
        Upstream("test_local_plan_with_caching", MAIN, not_ours=CACHE),
        Upstream("test_global_plan_with_caching", MAIN, not_ours=CACHE),
        Upstream("test_finish_plan_with_caching", MAIN, not_ours=CACHE),
        Upstream("test_merge_delta_local_plans", MAIN, not_ours=CACHE),
        Upstream("test_compare_save_plans", MAIN, not_ours=CACHE),
        Upstream("test_non_overlapping_chunks", MAIN, LAYOUTS),
        Upstream(
            "test_detect_overlapping_chunks",
            MAIN,
            (),
            ("tests/dist_checkpointing/test_refusals.py::test_a_save_that_cannot_be",),
            HELPER,
        ),
        Upstream(
            "test_version_key_in_planner_data",
            MAIN,
            not_ours="newer indexes name their version; 2.4 to 2.6 have none",
        ),
    ),
    "test_file_system_checkpoint.py": (
        Upstream("test_read_write_only_tensor", BOTH, OBJECTS),
        Upstream("test_read_write_shard_tensor", BOTH, (*LAYOUTS, "dcp, programs/training fsdp1*")),
        Upstream("test_load_with_different_shard_plan", BOTH, LAYOUTS),
        Upstream("test_load_rowwise_to_colwise", BOTH, ("dcp/another_layout rows columns",)),
        Upstream("test_save_load_bytes", BOTH, OBJECTS),
        Upstream("test_switch_between_sharded_tensor_to_tensor", BOTH, ("dcp/another_layout *plain*",)),
    ),
    "test_file_system_checkpoint_cpu.py": (
        Upstream("test_read_write_only_tensor", BOTH, OBJECTS),
        Upstream("test_read_write_shard_tensor", BOTH, (*LAYOUTS, "dcp, programs/training fsdp1*")),
        Upstream("test_load_with_different_shard_plan", BOTH, LAYOUTS),
        Upstream("test_load_rowwise_to_colwise", BOTH, ("dcp/another_layout rows columns",)),
        Upstream("test_save_load_bytes", BOTH, OBJECTS),
        Upstream("test_switch_between_sharded_tensor_to_tensor", BOTH, ("dcp/another_layout *plain*",)),
        Upstream("test_read_write_tensor_and_blob", MAIN, not_ours=EXTENSION),
        Upstream("test_no_close_writer_does_not_flush_raw_stream", MAIN, not_ours=STREAM),
        Upstream("test_transform_with_extension_does_not_flush_raw_stream", MAIN, not_ours=EXTENSION),
        Upstream(
            "test_file_system_writer_flush_counts",
            MAIN,
            (),
            ("tests/ranks/test_dcp_remote.py::test_what_a_save_forces_to_the_disk",),
            STREAM,
        ),
    ),
    "test_save_load_api.py": (
        Upstream("test_auto_detect", BOTH, ("dcp/storage_of_an_unknown_kind *", *OBJECTS)),
        Upstream("test_assert_same_keys", MAIN, not_ours="a helper for programs, newer than torch 2.6"),
    ),
    "test_checkpoint.py": (
        Upstream("test_tensor_metadata_with_missing_rank_spec", BOTH, not_ours=HELPER),
        Upstream("test_default_metadata", BOTH, not_ours=HELPER),
        Upstream(
            "test_dummy_writer_works",
            BOTH,
            OBJECTS,
            ("tests/ranks/test_dcp.py::test_the_same_files_are_written",),
        ),
        Upstream(
            "test_dummy_reader_works",
            BOTH,
            OBJECTS,
            ("tests/ranks/test_dcp.py::test_the_rest_of_a_load_is_as_before",),
        ),
        Upstream("test_save_error_handling", BOTH, ("dcp, failures/save_fails *",)),
        Upstream("test_save_error_handling_no_dist", BOTH, ("dcp, failures/save_fails *no process group",)),
        Upstream("test_load_error_handling", BOTH, ("dcp, failures/load_fails *",)),
        Upstream("test_load_error_handling_no_dist", BOTH, ("dcp, failures/load_fails *no process group",)),
    ),
    "test_utils.py": (
        Upstream("test_init_convert_offset", BOTH, not_ours=INDEX),
        Upstream("test_index_hint_ignored_on_equals", BOTH, not_ours=INDEX),
        Upstream("test_index_hint_ignored_on_hash", BOTH, not_ours=INDEX),
        Upstream("test_flat_data", BOTH, not_ours=INDEX),
        Upstream("test_sharded_tensor_lookup", BOTH, not_ours=INDEX),
        Upstream("test_dcp_logger", BOTH, not_ours="torch's own logger"),
        *(
            Upstream(name, MAIN, OBJECTS, not_ours="a view of a file that torch reads through")
            for name in (
                "testShortRead",
                "testLongRead",
                "testAllRead",
                "testShortReadinto",
                "testLongReadinto",
            )
        ),
        *(
            Upstream(
                name,
                MAIN,
                ("dcp/another_number_of_ranks *",),
                ("tests/ranks/test_dcp.py::test_groups_with_global_rank_0",),
            )
            for name in ("test_gather_object", "test_scatter_object", "test_barrier")
        ),
        Upstream(
            "test_broadcast_object_with_nonzero_coordinator",
            MAIN,
            ("dcp, failures/* 1 1", "dcp, failures/* 2"),
        ),
        Upstream(
            "test_broadcast_object_global_local_mismatch",
            MAIN,
            (),
            ("tests/ranks/test_dcp.py::test_groups_with_global_rank_0",),
        ),
    ),
    "test_hf_storage.py": (
        Upstream(
            "test_write_data_hf",
            MAIN,
            (),
            ("tests/hf/test_state_dicts.py::test_files_have_what_the_ranks_hold",),
            HF,
        ),
        Upstream(
            "test_write_data_with_sharding",
            MAIN,
            (),
            (
                "tests/hf/test_safetensors_files.py::test_files_are_filled_in_order_and_a_large_tensor_has_its_own",
            ),
            HF,
        ),
        Upstream(
            "test_read_data_hf",
            MAIN,
            (),
            ("tests/hf/test_state_dicts.py::test_files_fill_what_the_ranks_hold",),
            HF,
        ),
        Upstream(
            "test_write_metadata_hf",
            MAIN,
            (),
            ("tests/hf/test_safetensors_files.py::test_several_files_are_one_model",),
            HF,
        ),
        Upstream(
            "test_read_metadata_hf",
            MAIN,
            (),
            ("tests/hf/test_safetensors_files.py::test_a_header_says_what_it_was_made_of",),
            HF,
        ),
    ),
    "e2e/test_e2e_save_and_load.py": (
        Upstream("test_e2e", BOTH, ("dcp, programs/training * False",)),
        Upstream("test_e2e_async_cached", BOTH, ("dcp, programs/training * later",)),
        Upstream("test_stateful_and_non_stateful_loads", BOTH, ("dcp, programs/what_is_replaced *",)),
        Upstream(
            "test_different_ordered_state_dict_keys", BOTH, ("dcp, programs/another_order_on_each_rank",)
        ),
        Upstream("test_no_dist", BOTH, ("dcp/nothing*",)),
        Upstream("test_partial_load", BOTH, ("dcp, programs/part_of_a_checkpoint *",)),
        Upstream("test_overwrite", BOTH, ("dcp/folder_with_a_checkpoint *",)),
        Upstream("test_no_cpu", BOTH, not_ours="a group with NCCL alone; the check is torch's own"),
        Upstream("test_init_state_dict", BOTH, ("dcp, programs/dicts_of_the_caller *",)),
    ),
    "e2e/test_fine_tuning.py": (Upstream("test_fine_tuning", BOTH, ("dcp, programs/fine_tuning *",)),),
    "e2e/test_fsdp_ep.py": (Upstream("test_e2e", BOTH, ("dcp, programs/experts",)),),
    "e2e/test_pipeline.py": (Upstream("test_pipeline", BOTH, ("dcp, programs/pipeline *",)),),
}
