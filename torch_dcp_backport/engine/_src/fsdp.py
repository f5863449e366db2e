"""The engine: mesh, model, batches, step, moves and export under the names of verl 0.7 to 0.9.

Composes the functions of the other modules; each of these serves a trainer's own loop as well.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Optional, Union

import torch
import torch.distributed as dist

from torch_dcp_backport import compat, rooms
from torch_dcp_backport.engine._src import (
    attention,
    batches,
    build,
    deltas,
    determinism,
    fused,
    groups,
    heads,
    lora,
    move,
    offload,
    packing,
    reach,
    tensor_parallel,
    verl,
)
from torch_dcp_backport.engine._src import step as steps
from torch_dcp_backport.engine._src.base import BaseEngine, EngineRegistry, default_device
from torch_dcp_backport.engine._src.checks import say
from torch_dcp_backport.engine._src.config import (
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    dtype_of,
    settings,
    settings_text,
)
from torch_dcp_backport.engine._src.export import whole_tensors
from torch_dcp_backport.engine._src.mesh import Grid, arrange
from torch_dcp_backport.transfer import Call, groups_of

BACKENDS, DEVICES = ["fsdp", "fsdp2"], ["cuda", "npu", "xpu", "hpu", "cpu"]


class FSDPEngine(BaseEngine):
    """A model of transformers under FSDP2, with its optimizer; subclasses define its outputs.

    `FSDPEngineWithLMHead` has an example.
    """

    #: Makes the model, within `build.parameters_on_meta`.
    make_model = staticmethod(build.language_model)
    #: Whether the values that `prime_delta_snapshots` keeps are in pinned memory, where the device is none.
    delta_pin_snapshots = True
    #: verl's name of the models that it is for; "" where it is for any.
    model_type = ""
    #: With `use_fused_kernels` elements of the logits that the head has at once.
    head_chunk = heads.CHUNK
    #: Whether losses are of log-probabilities, which the first token of a row does not have.
    predicts = False
    #: Parameters that the files need not have.
    fresh: Mapping[str, build.Draw] = {}
    #: Name in the files -> the name that another program saves the tensor under.
    other_names: Mapping[str, str] = {}

    def __init__(
        self,
        model_config: Union[ModelConfig, Mapping[str, object], object],
        engine_config: Optional[Union[EngineConfig, Mapping[str, object], object]] = None,
        optimizer_config: Optional[Union[OptimizerConfig, Mapping[str, object], object]] = None,
        checkpoint_config: Optional[Union[Mapping[str, object], object]] = None,
        *,
        device: Optional[str] = None,
    ) -> None:
        """Check the settings, and arrange the ranks where there are any. Collective.

        Args:
            model_config: a `ModelConfig`, a mapping of its settings, or verl's object.
            engine_config: an `EngineConfig`, a mapping of its settings, or verl's object; None takes the
                defaults.
            optimizer_config: an `OptimizerConfig`, a mapping of its settings, or verl's object; None is the
                defaults. It is read by `initialize`.
            checkpoint_config: the settings of the checkpoint manager.
            device: a type of device; None is this machine's accelerator, or the CPU.

        Raises:
            ValueError: a setting that is not offered or cannot be, or two that exclude each other; on every
                rank.
        """
        with Call("cannot make the engine", "settings", groups_of()) as call:
            with call.guard():
                self.model_config = settings(ModelConfig, model_config)
                verl.check_model_type(verl.within(model_config, "model_type"), self.model_type)
                self.engine_config = settings(EngineConfig, engine_config)
            call.barrier("checking the settings", kind=ValueError)
        #: A tokenizer or processor, where verl's object has it: its files go into every checkpoint.
        self.processing_class = getattr(model_config, "processor", None) or getattr(
            model_config, "tokenizer", None
        )
        #: Read by `initialize`: until then verl's trainers still write the number of steps into it.
        self.optimizer_config: Any = optimizer_config
        self.checkpoint_config: Any = checkpoint_config
        self.device = device or default_device()
        self.is_param_offload_enabled = self.engine_config.param_offload
        self.is_optimizer_offload_enabled = self.engine_config.optimizer_offload
        #: Why `enable_activation_offload` has no effect; "" where it has.
        self.no_activation_offload = (
            "forward_only=True has no backward pass"
            if self.engine_config.forward_only
            else "the device is the CPU"
            if self.device == "cpu"
            else ""
        )
        #: Steps that were not taken, since a gradient was not finite.
        self.skipped_steps = 0
        #: The head, where it makes log-probabilities by itself.
        self.fused_head: Optional[fused.FusedHead] = None
        self.module: Any = None
        self.lr_scheduler: Any = None
        self.checkpoint_manager: Any = None
        if dist.is_initialized():
            _ = self.grid

    @functools.cached_property
    def grid(self) -> Grid:  # type: ignore[override]
        """The arrangement of ranks; the first use arranges them. Collective."""
        own = self.engine_config
        return arrange(self.device, own.fsdp_size, own.tp_size, own.ulysses_sequence_parallel_size)

    @property
    def is_packing(self) -> bool:
        """Whether rows run in one sequence without padding, unless a batch says otherwise."""
        said = (self.model_config.use_remove_padding, self.engine_config.use_remove_padding)
        return True in said and False not in said

    def initialize(self) -> None:
        """Make the model, each rank its own slices, and its optimizer. Collective.

        Raises:
            RuntimeError: as `build.fill`, `mesh.arrange` and `step.divisor_of`; on every rank.
        """
        own = self.engine_config
        self.module = self.build()
        #: Factor of losses, so that gradients are means.
        self.scale = 1.0
        if not own.forward_only:
            self.scale = steps.divisor_of(self.grid, own.sharding) / self.grid.dp_size
            asked = self.optimizer_config
            self.optimizer = asked.made(groups.parted(self.module, asked.no_decay, lora.base_name).groups)
            self.lr_scheduler = steps.schedule(
                self.optimizer,
                asked.lr_scheduler_type,
                warmup=asked.warmup,
                total=asked.total_training_steps,
                least=asked.min_lr_ratio or 0.0,
                cycles=asked.num_cycles,
                decay=asked.lr_wsd_decay_steps or 0,
                decay_style=asked.lr_wsd_decay_style,
            )
        manager = rooms.offered("the manager of FSDP2 models")
        self.checkpoint_manager = manager(
            self.module,
            self.optimizer,
            self.lr_scheduler,
            self.processing_class,
            self.checkpoint_config,
            like=self.model_config.path,
        )
        if own.param_offload or own.optimizer_offload:
            self.to("cpu", model=own.param_offload, optimizer=own.optimizer_offload, grad=own.param_offload)

    def build(self) -> torch.nn.Module:
        """Make the model, sharded and filled. Collective."""
        own, asked = self.engine_config, self.model_config
        blocks = own.wrap_policy.get("transformer_layer_cls_to_wrap")
        model: Any = None
        absent: list[str] = []
        with Call("cannot build the model", "build", groups_of()) as call:
            dtype = dtype_of(own.model_dtype)
            with call.guard():
                if not own.forward_only:
                    self.optimizer_config = settings(OptimizerConfig, self.optimizer_config)
                    # Whether it takes its settings: before anything large is made.
                    self.optimizer_config.made([torch.nn.Parameter(torch.zeros(1, 1))])
                if own.full_determinism:
                    determinism.enable(own.seed)
            saved = call.attempt(lora.opened, call, asked, key="lora_adapter_path")
            with call.guard(), build.parameters_on_meta(dtype):
                model = self.make_model(asked, dtype)
                if self.is_packing:
                    packing.check(model, self.grid.sizes.ulysses)
                elif self.grid.sizes.ulysses > 1:
                    shared = f"ulysses_sequence_parallel_size={self.grid.sizes.ulysses}"
                    raise ValueError(f"{shared} needs use_remove_padding=True")
                if asked.enable_gradient_checkpointing:
                    model.gradient_checkpointing_enable({"use_reentrant": False})
                if asked.has_adapters and saved.error is None:
                    model = lora.adapted(call, model, asked, saved.value)
                if saved.error is None and saved.value is not None:
                    call.problems += lora.problems_of(model, saved.value)
                build.units_of(model, blocks)
                if not own.forward_only:
                    build.check_layers(model)
                    build.check_router_loss(model)
                    absent = groups.parted(model, self.optimizer_config.no_decay, lora.base_name).absent
                    tensor_parallel.check_dropout(model, self.grid)
                tensor_parallel.styles_of(model, self.grid)
            parts = [own, asked, *(() if own.forward_only else (self.optimizer_config,))]
            settings_by_type = (
                {} if call.problems else {type(part).__name__: settings_text(part) for part in parts}
            )
            adapter = saved.value.digest if saved.error is None and saved.value is not None else "none"
            common = {**settings_by_type, "lora_adapter_path": adapter, **build.outline(model)}
            call.barrier("comparing the settings", must_agree=common)
            for part in parts:
                for text in part.no_effect:
                    say(text)
            is_fused = asked.use_fused_kernels or own.use_fused_kernels
            no_fused = self.no_fused_head(model) if is_fused and not call.problems else ""
            if no_fused:
                say(f"use_fused_kernels=True has no effect here: {no_fused}")
            for kind in absent:
                say(f"no_decay={kind!r} has no effect here: the model trains no {kind}")
            if asked.enable_activation_offload and self.no_activation_offload:
                say(f"enable_activation_offload=True has no effect here: {self.no_activation_offload}")
        tensor_parallel.parallelize(model, self.grid)
        build.shard(model, self.grid, own.sharding, blocks, lora.apart(model) if asked.has_adapters else ())
        kind = "cpu" if own.offload_policy else self.device
        build.materialize(model, compat.current_device(kind), buffers=compat.current_device(self.device))
        fresh = {**self.fresh, **lora.FRESH}
        build.fill(
            model,
            asked.path,
            fresh=fresh,
            hf_name=lora.base_name,
            other_names=self.other_names,
            seed=own.seed,
        )
        if saved.value is not None:
            lora.fill(model, saved.value)
        if is_fused and not no_fused:
            self.fused_head = fused.FusedHead(model.get_output_embeddings(), self.head_chunk)
        return model  # type: ignore[no-any-return]

    def no_fused_head(self, model: Any) -> str:
        """Return why `use_fused_kernels` has no effect for a model; "" where it has.

        Args:
            model: the model, with its adapters.
        """
        if not self.predicts:
            return "only a language model has log-probabilities"
        if self.grid.tp is not None:
            return f"with tp_size={self.grid.sizes.tp} the head is a DTensor on each rank"
        return fused.why_not(model)

    def forward_backward_batch(
        self, data: batches.Batch, loss_function: Optional[Callable[..., Any]], forward_only: bool = False
    ) -> dict[str, Any]:
        """Run the model on a batch, and the loss backwards. Collective.

        All ranks run the same number of micro-batches. A rank that has fewer runs the missing ones on a row
        of zeros; the loss function is not called for them, and they do not appear in `loss` or `metrics`.

        Args:
            data: rows of this rank, padded or jagged, with `input_ids`, `loss_mask` and what the loss reads.
            loss_function: called with `model_output=`, `data=` (of a micro-batch, with `batch_num_tokens` of
                all ranks and `dp_size`; a TensorDict where the batch is one, else a dict) and `dp_group=`;
                returns the loss, whose mean over ranks is trained, and metrics. None computes no loss.
            forward_only: whether there is no backward pass.

        Returns:
            `model_output` in the order of the rows, `loss` and `metrics` of each micro-batch. Of all ranks'
            rows together, and the same on every rank: `num_tokens`, their tokens without padding, and
            `batch_num_tokens`, those with a loss (0 without a loss function).

        Raises:
            RuntimeError: as `batches.plan`; on every rank.
        """
        limit = functools.partial(self.engine_config.limit, data, forward_only)
        plan = batches.plan(
            data,
            limit,
            needs_tokens=loss_function is not None,
            copies=self.grid.copies,
            packs=functools.partial(self.packs, data),
            predicted=self.predicts,
        )
        common = {"batch_num_tokens": plan.tokens, "dp_size": self.grid.dp_size}
        if batches.ENTROPY in set(data.keys()):
            # Joined batches have it for each row, and a micro-batch without rows would have none.
            common[batches.ENTROPY] = plan.has_entropy
        if plan.is_packed:
            attention.install(self.module, self.grid.sp_group, self.grid.sizes.ulysses)
        outputs, losses, metrics = [], [], {}  # type: ignore[var-annotated]
        for number, micro in enumerate(batches.micro_batches(data, plan), 1):
            if plan.dropped and not micro.is_filler:
                micro = micro._replace(data=batches.with_predicted(micro.data))
            if not forward_only and self.engine_config.gradient_sync == "last":
                self.module.set_requires_gradient_sync(number == len(plan.parts))
            try:
                loss, output = self.forward_step(micro, common, loss_function, plan.is_packed, like=data)
                if not forward_only:
                    # In one process there is no such row, and its tokens reach no expert.
                    is_company = reach.uncounted(self.module) if micro.is_filler else contextlib.nullcontext()
                    with is_company:
                        torch.autograd.backward(loss * self.scale)
            except BaseException as error:
                reach.abandon_pass(self.module, error)
                raise
            outputs.append({name: value.detach() for name, value in output["model_output"].items()})
            if not micro.is_filler:
                losses.append(loss.item())
                collect(metrics, output["metrics"])
        if forward_only:
            # The root is unsharded until a backward pass: a step before the next pass would not be seen.
            compat.reshard(self.module)
        return {
            "model_output": batches.restored(outputs, plan),
            "loss": losses,
            "metrics": metrics,
            "num_tokens": plan.all_tokens,
            "batch_num_tokens": plan.tokens,
        }

    def packs(self, data: batches.Batch, limit: batches.Limit) -> bool:
        """Return whether a batch's rows run in one sequence.

        Args:
            data: the batch, whose own setting goes first.
            limit: the size of its micro-batches.

        Raises:
            ValueError: the batch asks for what this model, or the arrangement of ranks, does not go with.
        """
        shared = self.grid.sizes.ulysses
        if not batches.flag_of(data, "use_remove_padding", self.is_packing):
            if shared > 1:
                raise ValueError(
                    f"ulysses_sequence_parallel_size={shared} needs use_remove_padding=True; "
                    "the batch says False"
                )
            return False
        packing.check(self.module, shared)
        rope = packing.rope_by_length(getattr(self.module, "config", None))
        if rope and limit.tokens is not None:
            raise ValueError(
                f"use_dynamic_bsz=True with use_remove_padding=True: rope_scaling of type {rope!r} computes "
                "by the longest row of a micro-batch, and packing puts other rows together; "
                f"use_dynamic_bsz=False, or {packing.INSTEAD}"
            )
        return True

    def forward_step(
        self,
        micro: batches.Micro,
        common: Mapping[str, Any],
        loss_function: Optional[Callable[..., Any]],
        is_packed: bool = False,
        *,
        like: Any = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return loss, and outputs with metrics, of a micro-batch. Collective.

        Args:
            micro: the micro-batch.
            common: further entries of its data, the same in each micro-batch.
            loss_function: as of `forward_backward_batch`.
            is_packed: whether the rows run in one sequence.
            like: the batch: the loss gets its data in the batch's form.
        """
        device = compat.current_device(self.device)
        data = {**batches.on_device(micro.data, device, like), **common}
        if is_packed:
            group, size = self.grid.sp_group, self.grid.sizes.ulysses
            packed = packing.packed(data, device, group, size)
            with attention.within(packed.rows) as rows:
                found = self.model_outputs(packed.inputs, packed.more, data)
            packing.check_asked(rows, self.module, size > 1)
            outputs = {name: packed.unpacked(value, data) for name, value in found.items()}
        else:
            inputs = batches.model_inputs(data, device)
            found = self.model_outputs(inputs, {}, data)
            outputs = {name: batches.like_rows(value, data) for name, value in found.items()}
        # The other ranks wait for this rank's part of the gradients, whatever its loss is of.
        nothing = torch.stack([value.float().sum() * 0 for value in found.values()]).sum()
        if micro.is_filler:
            return nothing, {"model_output": {}, "metrics": {}}
        loss, metrics = nothing.new_zeros(()), {}
        if loss_function is not None:
            group = self.get_data_parallel_group()
            asked = batches.like_batch(like, data, len(micro.rows))
            loss, metrics = loss_function(model_output=outputs, data=asked, dp_group=group)
            if not loss.requires_grad:
                loss = loss + nothing
        return loss, {"model_output": outputs, "metrics": metrics}

    def model_outputs(
        self,
        inputs: Mapping[str, torch.Tensor],
        more: Mapping[str, torch.Tensor],
        data: Mapping[str, Any],
    ) -> dict[str, torch.Tensor]:
        """Run the model, and return the outputs that losses read, by row and column. Collective.

        Args:
            inputs: the model's inputs.
            more: what `prepare_model_outputs` reads beside them.
            data: the micro-batch's data.
        """
        with self.saving():
            logits = self.module(**inputs, use_cache=False).logits
        return self.prepare_model_outputs(logits, {**inputs, **more}, data)

    def saving(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for the model's forward pass, which says where autograd saves tensors."""
        if self.model_config.enable_activation_offload and not self.no_activation_offload:
            return offload.saved_on_host(self.module, self.device)
        return contextlib.nullcontext()

    def prepare_model_outputs(
        self, logits: torch.Tensor, inputs: Mapping[str, torch.Tensor], data: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return the outputs that losses read, by row and column; subclasses define it.

        Args:
            logits: the model's logits, (rows, columns, classes); of packed rows (1, tokens, classes), with
                this rank's tokens.
            inputs: the model's inputs, as of `model_inputs`; of packed rows with `labels`, the token behind
                each token (-100 where there is none), and `rows`, the number of its row in the data.
            data: the micro-batch's data.
        """
        raise NotImplementedError

    def optimizer_step(self) -> float:
        """Clip and step; return the norm before the clipping. Collective.

        A step with a gradient that is not finite is skipped, and counted in `skipped_steps`.
        """
        assert self.optimizer is not None, "forward_only"
        done = steps.step(self.optimizer, self.optimizer_config.clip_grad)
        self.skipped_steps += done.is_skipped
        return done.grad_norm

    def lr_scheduler_step(self) -> float:
        """Step the schedule, and return the new learning rate."""
        self.lr_scheduler.step()
        return float(self.lr_scheduler.get_last_lr()[0])

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move parameters (with their gradients) and optimizer states to "cpu" or to the device.

        Args:
            device: "cpu", or the type of the engine's device.
            model: whether the parameters are moved.
            optimizer: whether the optimizer's states are moved.
            grad: verl's, and without effect: gradients go with their parameters.

        Raises:
            RuntimeError: FSDP2 has them on the host by its own policy.
            ValueError: another device.
        """
        if device not in ("cpu", self.device):
            raise ValueError(f"cannot move to {device!r}: expected 'cpu' or {self.device!r}")
        where = compat.current_device(device)
        if model:
            move.move_model(self.module, where)
        if optimizer and self.optimizer is not None:
            move.move_optimizer(self.optimizer, where)

    def save_checkpoint(
        self,
        local_path: Union[str, Path],
        hdfs_path: Optional[str] = None,
        global_step: int = 0,
        max_ckpt_to_keep: Optional[int] = None,
        **unknown: Any,
    ) -> None:
        """Save as `checkpoint.FSDPCheckpointManager.save_checkpoint` does. Collective.

        Args:
            local_path: the folder, which every rank sees.
            hdfs_path: a URL of fsspec that the first rank uploads the folder to; None uploads nothing.
            global_step: the step of the training.
            max_ckpt_to_keep: the number of good folders to keep; None keeps all.
            unknown: options of other releases of verl, which are named in a warning and have no effect.
        """
        verl.say_unknown("save_checkpoint", unknown)
        self.checkpoint_manager.save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    def load_checkpoint(
        self,
        local_path: Union[str, Path],
        hdfs_path: Optional[str] = None,
        del_local_after_load: bool = False,
        **unknown: Any,
    ) -> None:
        """Load as `checkpoint.FSDPCheckpointManager.load_checkpoint` does. Collective.

        Args:
            local_path: the folder, the same on every rank.
            hdfs_path: the URL that the folder is brought from, if it is absent or incomplete.
            del_local_after_load: whether a folder that this load has brought is removed once it is loaded.
            unknown: options of other releases of verl, which are named in a warning and have no effect.
        """
        verl.say_unknown("load_checkpoint", unknown)
        self.checkpoint_manager.load_checkpoint(local_path, hdfs_path, del_local_after_load)

    def get_per_tensor_param(
        self,
        layered_summon: bool = False,
        base_sync_done: bool = False,
        *,
        to: Optional[int] = None,
        dtype: Union[torch.dtype, str, None] = "as verl",
        **unknown: Any,
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], Optional[dict[str, Any]]]:
        """Return full tensors for a rollout, in buckets, and peft's configuration. Collective as it is read.

        Args:
            layered_summon: verl's, and without effect: buckets take no more memory for all layers.
            base_sync_done: whether a model with adapters gives the adapters alone, instead of its own weights
                as vLLM names them below adapters: `base_layer` in those of layers that it wraps. With the
                model's `lora={"merge": True}` it gives neither, but the weights with the adapter in them,
                under the files' names, and no configuration.
            to: the global rank that receives; None is every rank.
            dtype: the dtype of floating tensors; None is that of the parameters. By default as verl's:
                bfloat16, and of adapters alone their own.
            unknown: options of other releases of verl, which are named in a warning and have no effect.

        Returns:
            An iterator over (name, full tensor), and the adapter's configuration; None where there is none.
        """
        verl.say_unknown("get_per_tensor_param", unknown)
        adapter = lora.config_of(self.module)
        tensors = build.tensors_of(self.module)
        device = compat.current_device(self.device)
        is_alone = adapter is not None and base_sync_done and not self.model_config.is_merged
        cast = self.dtype_for_rollout(dtype, None if is_alone else torch.bfloat16)
        if adapter is not None and self.model_config.is_merged:
            return lora.merged(self.module, to=to, dtype=cast, device=device), None
        if adapter is not None:
            tensors = lora.adapters(tensors) if is_alone else lora.rollout_names(self.module, tensors)
        return whole_tensors(tensors, to=to, dtype=cast, device=device), adapter

    def get_per_tensor_param_shard(
        self, *, dtype: Union[torch.dtype, str, None] = "as verl", **unknown: Any
    ) -> tuple[Iterator[deltas.Shard], None]:
        """Return this rank's parts of what `get_per_tensor_param` gives, and None. Not collective.

        A part that needs no cast and no move is the model's own memory, as verl's is: the next step changes
        it. Clone what is to stay.

        Args:
            dtype: as of `get_per_tensor_param`.
            unknown: options of other releases of verl, which are named in a warning and have no effect.

        Returns:
            An iterator over (name, flat part, `ShardSpec`: full shape, mesh and placements), and None.

        Raises:
            ValueError: a model with adapters.
        """
        verl.say_unknown("get_per_tensor_param_shard", unknown)
        cast, device = self.dtype_for_rollout(dtype), self.device_of_parts()
        return deltas.shards(build.tensors_of(self.module), cast, device), None

    def prime_delta_snapshots(self, *, dtype: Union[torch.dtype, str, None] = "as verl") -> None:
        """Keep this rank's parts on the host, to compare the next export of changes with. Not collective.

        Call it on every rank, once a rollout has all of `get_per_tensor_param`, before the next step. Call it
        again after an error of an export, or where a tensor is new, gone, or of another shape, dtype or
        placement.

        Args:
            dtype: as of `get_per_tensor_param`; exports of changes have it, too.

        Raises:
            ValueError: a model with adapters.
        """
        cast, device = self.dtype_for_rollout(dtype), self.device_of_parts()
        self.last_export.prime(build.tensors_of(self.module), cast, device)

    def get_per_tensor_param_delta_shard(self, **unknown: Any) -> tuple[Iterator[deltas.Change], None]:
        """Return the elements that have changed since the last export, and None. Collective as it is read.

        What is read to its end is what the next export is compared with. verl's `delta_sharded` gathers the
        elements of each tensor in its group, and sends them to a rollout.

        Args:
            unknown: options of other releases of verl, which are named in a warning and have no effect.

        Returns:
            An iterator over (name and shape as a list of one, dtype, number of elements, positions in the
            flat tensor, values, group), in the same order on every rank, and None.

        Raises:
            ValueError: a model with adapters.
            RuntimeError: as it is read, on every rank: `prime_delta_snapshots` was not called, not to its
                end, or not as often on every rank; the export before this was refused, or not read to its
                end; a tensor is not as it was primed; ranks differ in names, their order, shapes, dtypes or
                placements.
        """
        verl.say_unknown("get_per_tensor_param_delta_shard", unknown)
        device = self.device_of_parts()
        return self.last_export.changes(build.tensors_of(self.module), device), None

    @functools.cached_property
    def last_export(self) -> deltas.Deltas:
        """The values that were exported last."""
        return deltas.Deltas(is_pinned=self.delta_pin_snapshots and self.device != "cpu")

    def device_of_parts(self) -> torch.device:
        """Return the device of this rank's parts and changes.

        Raises:
            ValueError: a model with adapters.
        """
        if self.model_config.has_adapters:
            raise ValueError(
                "parts and changes of a model with adapters are not offered: a rollout gets adapters by "
                "get_per_tensor_param(base_sync_done=True), which gives nothing else"
            )
        return compat.current_device(self.device)

    def dtype_for_rollout(
        self, dtype: Union[torch.dtype, str, None], default: Optional[torch.dtype] = torch.bfloat16
    ) -> Optional[torch.dtype]:
        """Return the dtype that floating tensors are cast to; None is their own.

        Args:
            dtype: a dtype, its name, None, or "as verl".
            default: the dtype "as verl".
        """
        return default if dtype == "as verl" else dtype_of(dtype)

    def save_adapter(self, folder: Union[str, Path]) -> None:
        """Write the adapters alone, as peft opens them. Collective.

        Args:
            folder: the folder for the adapters.

        Raises:
            RuntimeError: no adapters, a folder that cannot be written, ...; on every rank.
        """
        lora.save(self.module, folder)

    def disable_adapter(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context: the model without its adapters; without adapters the model as it is."""
        if not self.model_config.has_adapters:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = self.module.disable_adapter()
        return context


def collect(metrics: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Add a micro-batch's metrics to those before; verl's own metrics make their list."""
    for name, value in new.items():
        if name not in metrics:
            metrics[name] = value.init_list() if hasattr(value, "init_list") else []
        (metrics[name].extend if isinstance(value, list) else metrics[name].append)(value)


@EngineRegistry.register("language_model", BACKENDS, DEVICES)
class FSDPEngineWithLMHead(FSDPEngine):
    """An engine for language models: `log_probs` of the next tokens, and with `calculate_entropy` `entropy`.

    Example:
        Within a process group. A module stands in for a model of transformers; leave out `make_model` where
        transformers makes it.

        >>> from collections import namedtuple
        >>> import torch
        >>> from torch import nn
        >>> from torch_dcp_backport import engine, hf
        >>> Output = namedtuple("Output", ["logits"])
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        ...     def forward(self, input_ids, attention_mask, position_ids, use_cache):
        ...         return Output(self.head(self.embed(input_ids)))
        >>> class Engine(engine.FSDPEngineWithLMHead):
        ...     def make_model(self, config, dtype):
        ...         return Model()
        >>> _ = hf.save_state_dict(Model().state_dict(), "model", like={"model_type": "small"})
        >>> settings = {"forward_only": True, "max_token_len_per_gpu": 64}
        >>> trained = Engine({"path": "model"}, settings, device="cpu")
        >>> trained.initialize()
        >>> tensors, adapter = trained.get_per_tensor_param()
        >>> [(name, tuple(tensor.shape)) for name, tensor in tensors]
        [('embed.weight', (8, 4)), ('head.weight', (8, 4))]

        A step, without `forward_only`; on the CPU FSDP2 needs torch 2.7 for it:

        >>> ids = torch.tensor([[1, 2, 3]])
        >>> with trained.train_mode():  # doctest: +SKIP
        ...     trained.train_batch({"input_ids": ids, "loss_mask": torch.ones_like(ids)}, engine.sft_loss)
    """

    model_type = "language_model"
    predicts = True

    def prepare_model_outputs(
        self, logits: torch.Tensor, inputs: Mapping[str, torch.Tensor], data: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return `log_probs`, and with `calculate_entropy` in the data `entropy`: float32, (rows, columns).

        Args:
            logits: the model's logits, (rows, columns, vocabulary); divided by the data's `temperature`.
            inputs: as of `FSDPEngine.prepare_model_outputs`.
            data: the micro-batch's data.
        """
        factor = temperature_by_token(inputs, data, logits.dtype)
        if factor is not None:
            logits = logits / factor
        if packing.LABELS in inputs:
            outputs = {"log_probs": heads.log_probs(logits, inputs[packing.LABELS])}
        else:
            outputs = {"log_probs": heads.next_log_probs(logits, inputs[batches.IDS], inputs[batches.MASK])}
        if data.get(batches.ENTROPY, False):
            outputs["entropy"] = heads.entropy(logits)
        return outputs

    def model_outputs(
        self,
        inputs: Mapping[str, torch.Tensor],
        more: Mapping[str, torch.Tensor],
        data: Mapping[str, Any],
    ) -> dict[str, torch.Tensor]:
        """Return what `prepare_model_outputs` does, with `use_fused_kernels` by the head itself. Collective.

        Args:
            inputs: the model's inputs.
            more: what is read beside them.
            data: the micro-batch's data.
        """
        if self.fused_head is None:
            return super().model_outputs(inputs, more, data)
        ids, known = inputs[batches.IDS], {**inputs, **more}
        labels = more.get(packing.LABELS)
        if labels is None:
            labels = heads.next_labels(ids, inputs[batches.MASK])
        factor = temperature_by_token(known, data, torch.float32)
        if isinstance(factor, float):
            factor = torch.full((1, 1, 1), factor, device=ids.device)
        by_token = None if factor is None else factor.squeeze(-1).expand(ids.shape)
        with self.fused_head.asking(fused.Asked(labels, by_token, data.get(batches.ENTROPY, False))):
            with self.saving():
                logits = self.module(**inputs, use_cache=False).logits
            return self.fused_head.results(logits, self.module)


def temperature_by_token(
    inputs: Mapping[str, torch.Tensor], data: Mapping[str, Any], dtype: torch.dtype
) -> Union[None, float, torch.Tensor]:
    """Return what logits are divided by: a number, or numbers that go with (rows, columns, classes)."""
    temperature = batches.temperature_of(data)
    if not isinstance(temperature, torch.Tensor):
        return None if temperature == 1.0 else max(temperature, 1e-8)
    factor = temperature.clamp(min=1e-8).to(inputs[batches.IDS].device, dtype)
    # Half precision has no 1e-8; rows without tokens have no temperature.
    factor = factor.where(factor > 0, 1.0).view(-1, 1, 1)
    if packing.ROWS in inputs and len(factor) > 1:
        factor = factor.squeeze(-1)[inputs[packing.ROWS].squeeze(0)][None]
    return factor


@EngineRegistry.register("value_model", BACKENDS, DEVICES)
class FSDPEngineWithValueHead(FSDPEngine):
    """An engine for value models: `values` of the tokens. The head is drawn where the files have none.

    A head that trl has saved (`v_head.summary.weight` and `.bias`) is read; half of one is an error.

    It is used as `FSDPEngineWithLMHead` is.
    """

    model_type = "value_model"
    make_model = staticmethod(build.value_model)
    #: No file of a language model has it.
    fresh: Mapping[str, build.Draw] = {"*score.weight": build.as_linear, "*score.bias": build.zeros}
    #: As trl saves it.
    other_names: Mapping[str, str] = {
        "score.weight": "v_head.summary.weight",
        "score.bias": "v_head.summary.bias",
    }

    def prepare_model_outputs(
        self, logits: torch.Tensor, inputs: Mapping[str, torch.Tensor], data: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return `values`: float32, (rows, columns).

        Args:
            logits: the model's output, (rows, columns, 1).
            inputs: as of `FSDPEngine.prepare_model_outputs`.
            data: the micro-batch's data.
        """
        return {"values": heads.values(logits)}
