"""The Hugging Face Trainer: what its DistributedDataParallel reduces travels compressed through shard servers.

torchrun --nproc-per-node=2 client/examples/with_trainer.py grpc://127.0.0.1:7070
"""

import sys
import tempfile

import torch
from gradwire.transformers import ThroughShards
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0,
                                   eos_token_id=0))  # random, tiny
text = open(__file__).read().encode() * 4
samples = [torch.tensor(list(text[i : i + 64])) for i in range(0, len(text) - 64, 5)]
folder = tempfile.TemporaryDirectory()
arguments = TrainingArguments(folder.name, per_device_train_batch_size=8, max_steps=100, learning_rate=3e-3,
                              logging_steps=50, report_to="none", save_strategy="no", disable_tqdm=True,
                              use_cpu=not torch.cuda.is_available())
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": s, "labels": s} for s in samples])
shards = ThroughShards(trainer, servers=sys.argv[1:], job="trainer-example")
trainer.add_callback(shards)  # the line that changes
trainer.train()
if trainer.is_world_process_zero():
    print(f"{shards.stats()['pushed_bytes'] / 1e3:.0f} kB pushed")
