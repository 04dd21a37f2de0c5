"""A script as transformers' documentation shows it, with a small model made from its config."""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from toolkit.plugins.integrations import TransformersCallback

inputs = torch.randint(0, 64, (384, 12), generator=torch.Generator().manual_seed(5))
dataset = [{"input_ids": row, "labels": (row > 31).long().sum() > 6} for row in inputs]
dataset = [{**sample, "labels": sample["labels"].long()} for sample in dataset]

set_seed(7)
sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
model = BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=16, **sizes))
args = TrainingArguments(
    output_dir="out",
    num_train_epochs=4,
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    logging_steps=10,
    eval_strategy="epoch",
    save_strategy="no",
    use_cpu=True,
    report_to="none",
)
trainer = Trainer(model=model, args=args, train_dataset=dataset, eval_dataset=dataset[:32])
resume = TransformersCallback(trainer)
trainer.train(resume_from_checkpoint=resume.checkpoint)
trainer.save_model("end")
