"""Tiny sequence classifiers in Hugging Face's form, with tokenizers of their own, made here and never downloaded."""

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

TEXTS = ["abcdefghijklmnopqrstuvwxyz ?!.:0123456789", "what is the answer", "the answer is ab", "question", "[ ]CLSEP"]
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]


def text_tokenizer(folder: Path, template: str | None = None, size: int = 80,
                   positions: int = 64) -> transformers.PreTrainedTokenizerFast:
    """A BPE tokenizer that marks texts as BERT's do, saved in `folder`."""
    core = Tokenizer(models.BPE(unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False))
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]",
        model_max_length=positions, model_input_names=["input_ids", "token_type_ids", "attention_mask"])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def deberta(folder: Path, num_labels: int = 1, template: str | None = None, positions: int = 64) -> Path:
    """A DeBERTa-v3 as its authors configure it, but tiny; with weights large enough to tell texts apart."""
    torch.manual_seed(0)
    tokenizer = text_tokenizer(folder, template, positions=positions)
    config = transformers.DebertaV2Config(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        relative_attention=True, pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", share_att_key=True,
        position_biased_input=False, position_buckets=8, max_position_embeddings=positions, type_vocab_size=2,
        pad_token_id=0, pooler_hidden_size=16, num_labels=num_labels, initializer_range=0.5)
    transformers.DebertaV2ForSequenceClassification(config).save_pretrained(folder)
    return folder


def gpt2(folder: Path) -> Path:
    """A decoder that is none of ours, which pads with the token that ends its texts."""
    torch.manual_seed(0)
    tokenizer = text_tokenizer(folder)
    tokenizer.pad_token = tokenizer.eos_token = "[SEP]"
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(folder)
    config = transformers.GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=64,
                                     num_labels=1, pad_token_id=2, eos_token_id=2, bos_token_id=1,
                                     initializer_range=0.5)
    transformers.GPT2ForSequenceClassification(config).save_pretrained(folder)
    return folder
