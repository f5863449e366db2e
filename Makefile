# Needs python3 >= 3.9 with venv, nothing else: tools/lanes.py makes the environments.
PYTHON ?= python3
LANES = $(PYTHON) tools/lanes.py
# Lanes at a time: two, unless something else is said ("--jobs 1"); a third one takes 6 GiB.
JOBS ?=
FORMATS = tests/dist_checkpointing/test_megatron_formats.py
# megatron-core's own models, trained and saved.
MODELS = tests/megatron/test_megatron_core.py tests/megatron/test_megatron_families_core.py tests/megatron/test_megatron_manager_core.py
# Its distributed optimizer, carried to other grids.
OPTIMIZERS = tests/megatron/test_megatron_distributed.py
# Of the examples, on torch 2.7; the matrix runs all.
ENGINES = -k engine

# Of the newest torch, transformers and peft: what goes by their insides.
NEWEST = tests/engine tests/hf tests/checkpoint/test_watching.py tests/checkpoint/test_peft.py \
	tests/megatron/test_megatron_families.py tests/megatron/test_megatron_computing.py

.PHONY: help demo demo-engine demo-reshard demo-resume demo-megatron test test-between test-ends test-pythons test-matrix examples \
	clients clients-ray clients-2.6 clients-2.5 clients-0.7 clients-0.9 s3 transformers newest newest-look newest-take test-2.14 megatron megatron-2.4 megatron-newer megatron-newest emulated conformance reliability \
	patched-page private-page compatibility lint wheel docs diagrams outputs shots gpu gpu-old

help:
	@echo 'make demo          a real model out of memory on torch 2.6.0, and the cure: a table and memory.png'
	@echo 'make demo-reshard  a training state saved by 4 ranks and loaded by others: a table and reshard.png'
	@echo 'make demo-resume   a training killed ten times, on the same ranks and on 1 to 6: a table and resume.png'
	@echo 'make demo-megatron Hugging Face weights into megatron-core and back: a table and megatron.png'
	@echo 'make demo-engine   a small Qwen2 trained under FSDP2 on four ranks beside one process, padded and packed: a table and engine.png'
	@echo 'make test          the suite on torch 2.6.0 (patched) and on a current torch (does nothing)'
	@echo 'make wheel         a wheel to pin, in dist/, checked in clean environments'
	@echo 'make docs          a site of all pages and a reference of all public names, in build/site'
	@echo 'make shots         pictures of that site at 1280 and 390 px, in build/shots'
	@echo 'make lint          ruff and mypy --strict'
	@echo 'make examples      what is in examples/, and every command in README and docs/'
	@echo 'make test-matrix   torch 2.4 to 2.7 and a current one; torch 2.6 on Python 3.9 and 3.13'
	@echo 'make emulated      loads, gets and checkpoints on an emulated accelerator, by the rules of NCCL'
	@echo 'make gpu           on a machine with one NVIDIA GPU, with the torch that is there: a table and gpu.json'
	@echo 'make gpu-old       the same for the shim, where that torch is 2.4 to 2.6: a table and gpu-old.json'
	@echo 'make clients       lightning-fabric, accelerate, torchtune and verl as they are'
	@echo 'The others, and what writes pages of docs/: CONTRIBUTING.md. All need python3 >= 3.9 with venv.'

# The main job: a real model's out-of-memory on torch 2.6.0, and the cure.
demo:
	$(LANES) run 2.6 -- python -m torch_dcp_backport verify --plot memory.png

# Sharded checkpoints on other ranks and meshes, beside torch's own.
demo-reshard:
	$(LANES) run 2.6 -- python benchmarks/checkpoints.py --plot reshard.png

# A training killed at random and resumed, beside the same undisturbed; SEED="--seed 1" for other kills.
demo-resume:
	$(LANES) run current -- python benchmarks/resume.py $(SEED) --plot resume.png

# Hugging Face weights into megatron-core's own model and back, beside verl's functions and mbridge.
demo-megatron:
	$(LANES) run megatron -- python benchmarks/hf_megatron.py --plot megatron.png

# Training under FSDP2 beside one process: a table and engine.png.
demo-engine:
	$(LANES) run current -- python -m torch.distributed.run --standalone --nproc-per-node 4 examples/engine_sft.py \
		--plot engine.png

# torch 2.6.0 (patched) and a current torch (does nothing); ALSO="2.4 2.5" for more lanes at the same time, with less
# in each (see LEAVES_OUT in tools/lanes.py) unless WHOLE=--whole. BESIDE=--beside-newest leaves to `make newest` what
# it runs, where its torch is the current one.
test:
	$(LANES) test $(JOBS) $(WHOLE) $(BESIDE) $(ALSO) current 2.6

# The releases in between, which run what torch's own code could make another result of.
test-between:
	$(LANES) test $(JOBS) 2.5 2.7

# The first patch releases, which differ from the last ones only in what activation looks at.
ORDERS = pending_until_it_is_applied deactivate_restores_by_identity_and_activate_works_again
test-ends:
	$(LANES) test $(JOBS) 2.4.0 2.5.0 -- tests/imports/test_signatures.py \
		$(addprefix tests/imports/test_orders.py::test_,$(ORDERS))

# The oldest and the newest Python that torch 2.6 has wheels for; said to be skipped where one is not here.
test-pythons:
	$(LANES) test 2.6-py3.9 2.6-py3.13 -- tests/unit tests/imports torch_dcp_backport/regression

test-matrix: test-ends test-pythons megatron-2.4 megatron-newer
	$(MAKE) test ALSO="2.4 2.5 2.7" WHOLE=--whole
	$(MAKE) examples ENGINES=
	$(LANES) test megatron-2.4 -- $(MODELS)

# What is in examples/, on four ranks, and every command and program in README and docs/; on torch 2.7 what 2.6 cannot
# train. Not on torch 2.13: once in ten times, with or without us, its processes abort at exit after a
# DTensor.full_tensor() on the CPU ("terminate called without an active exception").
examples:
	$(LANES) test 2.6 -- tests/examples
	$(LANES) test 2.7 -- tests/examples/test_examples.py $(ENGINES)

# lightning-fabric, accelerate, torchtune and verl as they are, on torch 2.6.0 and 2.5.1, with the backport imported
# first, last and not at all.
clients: clients-ray clients-2.6 clients-2.5 clients-0.7 clients-0.9

# Ray gives up on a process of its own that has not begun within 30 s: not beside much else.
clients-ray:
	OMP_NUM_THREADS=1 $(LANES) test clients -- tests/clients/test_ray.py

# With more threads than processors, those of OpenMP wait for each other by turning: 132 s, and 69 s with one each.
clients-2.6:
	OMP_NUM_THREADS=1 $(LANES) test clients -- tests/clients --ignore=tests/clients/test_ray.py --timeout 900
	$(LANES) test clients -- tests/engine/test_engine_lora.py tests/checkpoint/test_peft.py

# LEAVE_OUT: pytest's arguments; CI leaves accelerate to torch 2.6, since its FSDP2 refuses older ones.
clients-2.5:
	OMP_NUM_THREADS=1 $(LANES) test clients-2.5 -- tests/clients --ignore=tests/clients/test_ray.py --timeout 900 $(LEAVE_OUT)

# verl's worker and losses on our engine, beside one process; its worker and trainer with our checkpoints.
VERL = tests/engine/test_engine_verl.py tests/engine/test_verl_workers.py
clients-0.7:
	$(LANES) test verl -- $(VERL) tests/engine/test_verl_trainer.py tests/megatron/test_megatron_verl.py

# And its SFT program.
clients-0.9:
	$(LANES) test verl-0.9 -- $(VERL) tests/engine/test_verl_sft.py tests/engine/test_verl_trainer.py::test_it_resumes

# Checkpoints in an object store: moto's S3 server in a process of its own, reached through s3fs.
s3:
	$(LANES) test s3 -- tests/checkpoint/test_object_store.py

# Files between transformers 4.51, 4.57 and 5, and what an export does with the experts that transformers 5 packs.
transformers:
	$(LANES) test transformers -- tests/releases tests/hf/test_apart.py tests/hf/test_names_of_exports.py \
		-k "release or apart or save_pretrained"

# The newest torch, transformers, safetensors, peft and accelerate together, as pinned in tools/newest.txt.
newest:
	$(LANES) test newest -- $(NEWEST)
	OMP_NUM_THREADS=1 $(LANES) test newest -- tests/clients/test_accelerate.py --timeout 900

# What the registry has that is newer than the pins; then `make newest` with it, and pinned where that passes.
newest-look:
	$(PYTHON) tools/newest.py look
newest-take:
	$(PYTHON) tools/newest.py take -- $(MAKE) newest

# A release between those that CI runs, with nothing left out. A CUDA build, 3 GB to download.
test-2.14:
	$(LANES) test 2.14

# Each rank would start as many processes to compile in as there are processors, and each of these imports torch.
megatron megatron-2.4 megatron-newer megatron-newest: export TORCHINDUCTOR_COMPILE_THREADS = 1

# megatron-core's own models on the CPU; the other tests of the two rooms are in the lanes of `make test`.
megatron:
	$(LANES) test megatron -- $(MODELS) $(OPTIMIZERS) $(FORMATS) tests/dist_checkpointing/test_exchange.py

# Checkpoints of later releases of megatron-core, which are imported without their dependencies, and the models of the
# newest that the registry has.
megatron-newer: megatron-newest
	$(LANES) test megatron-0.14 -- $(FORMATS)
	$(LANES) test megatron-0.19 -- $(MODELS)

# Of the newest what CI has the time for: checkpoints both ways, and logits of a dense and of a sparse model.
megatron-newest:
	$(LANES) test megatron-0.19 -- $(FORMATS) tests/megatron/test_megatron_core.py -k "megatron_loads or we_load or logits and (qwen2-tp or qwen3_moe-ep)"

# Its checkpoints on torch 2.4.1; the matrix has its models there, too.
megatron-2.4:
	$(LANES) test megatron-2.4 -- $(FORMATS) tests/dist_checkpointing/test_exchange.py

# The package on a device that is not the CPU, which g++ compiles for each torch: a backend with the rules of NCCL counts
# what is opened and sent.
emulated: export OMP_NUM_THREADS = 1
emulated:
	$(LANES) test $(JOBS) 2.6 2.7 -- tests/emulated

# Records what native torch, ours and stock torch give in every scenario, and writes docs/conformance.md.
conformance:
	for lane in 2.7 current; do $(LANES) run $$lane -- python tests/conformance/record.py native || exit 1; done
	for lane in 2.6 2.5 2.4; do $(LANES) run $$lane -- python tests/conformance/record.py ours || exit 1; done
	for lane in 2.6 2.5 2.4; do $(LANES) run $$lane -- python tests/conformance/record.py stock || exit 1; done
	$(LANES) run current -- python tests/conformance/record.py docs

# Writes docs/reliability.md from the table of faults.
reliability:
	$(LANES) run 2.6 -- env PYTHONPATH=.:tests:tests/ranks python tests/ranks/reliability.py

# Writes docs/what-is-patched.md from the records in patches/ and the table of replaced names.
patched-page:
	$(PYTHON) tools/patched_page.py

# Writes docs/private-members.md from the list of what the rooms use of torch's private members.
private-page:
	$(PYTHON) tools/private_page.py

# Writes the table of docs/compatibility.md from what the lanes' last good runs have passed.
compatibility:
	$(PYTHON) tools/compatibility.py

lint:
	$(LANES) make 2.6 >/dev/null
	$(LANES) run lint -- ruff check .
	$(LANES) run lint -- ruff format --check .
	$(LANES) run lint -- mypy --python-executable "$$($(LANES) make 2.6)"

# Builds, checks what is inside, installs into a clean environment, and runs from outside the tree.
wheel:
	$(LANES) run lint -- python tools/check_wheel.py "$$($(LANES) make 2.6)"

# The pages, the examples and the reference; a dead link or a public name without a docstring is an error.
# VERSION=0.2.0 makes it in build/versions/0.2.0, beside those of other releases.
docs:
	$(LANES) run docs -- python tools/docs.py $(if $(VERSION),--version $(VERSION))

# The pictures of docs/ that are drawn from the code's own names.
diagrams:
	$(PYTHON) tools/diagrams.py

# What the examples print, for their pages of the site.
outputs:
	$(LANES) run 2.6 -- python tools/record_outputs.py
	$(LANES) run current -- python tools/record_outputs.py

# Screenshots of the site that `make docs` has made, at 1280 and 390 px, in build/shots, by the machine's Chromium.
shots: docs
	$(LANES) run shots -- python tools/shots.py

# What one NVIDIA GPU can tell, with the torch of $(PYTHON), within 10 minutes; no lane: those have CPU builds.
gpu:
	$(PYTHON) tools/gpu.py

# The shim by torch's own names, beside stock torch, with torch 2.4 to 2.6 and one NVIDIA GPU, within 6 minutes.
gpu-old:
	$(PYTHON) tools/gpu.py --old
