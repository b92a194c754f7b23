"""The rows of a preference run, as its config's data block names them.

Owns turning the block into pairs and labelled answers, tokenised. Every rank makes the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.config.preference_schema import PreferenceConfig
from hybridflow.config.schema import Config
from hybridflow.config.words import DataSource
from hybridflow.data.loader import TokenisedPrompt, fit_prompts, tokenise_prompts
from hybridflow.data.preference import (
    LabelRows,
    Limits,
    PairRows,
    PreferenceSplit,
    TextPreference,
    TextRow,
    as_labels,
)
from hybridflow.data.preference_pairs import WrongAnswer, preference_pairs
from hybridflow.data.preference_rows import held_out_records, read_preference_files
from hybridflow.data.readers import FileFormat
from hybridflow.data.records import prompt_text
from hybridflow.data.token_rows import Overlong
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.prompts import length_rule, read_records


def read_preferences(config: Config) -> PreferenceSplit:
    """Training and held-out rows.

    Raises:
        ValueError: a file, a row, a task or its settings are not as they must be, or a held-out prompt is a training
            prompt too.
    """
    data, preference = config.data, config.preference
    if data.source is DataSource.REASONING_GYM:
        records, wrong = read_records(config), WrongAnswer(preference.rejected.value)
        train, test = (preference_pairs(part, wrong, config.train.seed) for part in (records.train, records.test))
        return PreferenceSplit(train, test, records.test)
    file_format = FileFormat(data.source.value)
    (train, num_equal), (test, _) = (read_preference_files(files, file_format, preference.margin_key)
                                     for files in (data.train_files, data.test_files))
    _require_apart(train, test)
    return PreferenceSplit(train, test, held_out_records(test), num_equal)


def require_pairs(rows: Sequence[TextRow]) -> tuple[TextPreference, ...]:
    """
    Raises:
        ValueError: a row is a single answer.
    """
    for row in rows:
        if not isinstance(row, TextPreference):
            raise ValueError(f"{row.origin}: keys 'chosen' and 'rejected' are missing; single answers with labels are "
                             "what the command kto learns from")
    return tuple(rows)


def pair_rows(inputs: Inputs, rows: Sequence[TextRow]) -> PairRows:
    """Tokenised pairs. Raises ValueError as `require_pairs` and `PairRows` do."""
    return PairRows(require_pairs(rows), inputs.tokenizer, _limits(inputs))


def label_rows(inputs: Inputs, rows: Sequence[TextRow]) -> LabelRows:
    """Tokenised answers; a pair is a good and a bad one. Raises ValueError as `LabelRows` does."""
    return LabelRows(as_labels(rows), inputs.tokenizer, _limits(inputs))


def require_weighed(config: Config, rows: LabelRows) -> None:
    """
    Raises:
        ValueError: a weight is set of answers that there are none of, or those that there are have the weight 0.
    """
    default = PreferenceConfig()
    found = {rows.desirable[row] for row in rows.kept}
    for name, label in (("desirable_weight", True), ("undesirable_weight", False)):
        weight = vars(config.preference)[name]
        if label not in found and weight != vars(default)[name]:
            raise ValueError(f"preference.{name} = {weight}: has no effect, since no training row has the label "
                             f"{str(label).lower()}; remove it")
        if found == {label} and weight == 0:
            raise ValueError(f"preference.{name} = 0: every training row has the label {str(label).lower()}, so that "
                             "nothing is learned from; choose e.g. 1.0")


def held_out_prompts(inputs: Inputs, split: PreferenceSplit) -> tuple[TokenisedPrompt, ...]:
    """The first evaluation.prompts held-out prompts, too long ones treated by data.overlong."""
    if not split.prompts:
        return ()
    config, records = inputs.config, split.prompts
    fitted = fit_prompts(records, tokenise_prompts(records, inputs.tokenizer, inputs.model.vocab_size),
                         length_rule(config))
    return tuple(TokenisedPrompt(i, fitted.tokens[i], records[i]) for i in fitted.kept[:config.evaluation.prompts])


def _limits(inputs: Inputs) -> Limits:
    config = inputs.config
    return Limits(config.data.max_prompt_length, config.generation.max_new_tokens, Overlong(config.data.overlong.value),
                  inputs.model.vocab_size)


def _require_apart(train: Sequence[TextRow], test: Sequence[TextRow]) -> None:
    held_out = {prompt_text(row.prompt): row.origin for row in test}
    both = [row for row in train if prompt_text(row.prompt) in held_out]
    if both:
        raise ValueError(f"{len(both)} of {len(train)} training rows have a held-out prompt, the first of them "
                         f"{both[0].origin} ({held_out[prompt_text(both[0].prompt)]}); remove them from "
                         "data.train_files or from data.test_files")
