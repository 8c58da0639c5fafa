"""Training by transformers.Trainer."""

import torch
import transformers

import machine


def losses_of(model, ids, folder, callbacks=(), **options):
    """The losses of all training steps on rows of ids that are their own labels."""
    given = transformers.TrainingArguments(
        output_dir=str(folder),
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=machine.device_type() == "cpu",
        **options,
    )
    data = [{"input_ids": row, "labels": row} for row in ids.cpu()]
    trainer = transformers.Trainer(model, given, train_dataset=data, callbacks=list(callbacks))
    trainer.train()
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
