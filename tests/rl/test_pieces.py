"""Which pieces a batch is cut into."""

from grpo_jax.functional.products import CPU
from grpo_jax.rl.pieces import Piece, choose_microbatches, choose_piece, choose_rows


def test_pieces_divide_a_minibatch_and_are_no_larger_than_they_should_be():
    for prompts in (1, 2, 6, 7, 12, 32):
        pieces = [choose_microbatches(prompts, tokens, 1_024) for tokens in (1, 50, 100, 300, 1_000, 3_000)]
        assert all(prompts % count == 0 for count in pieces)
        assert pieces == sorted(pieces)  # longer texts, more pieces
        assert (pieces[0], pieces[-1]) == (1, prompts)  # all at once, and one by one
    assert choose_microbatches(32, 256, 1_024) == 8
    assert choose_microbatches(32, 257, 1_024) == 16
    assert (choose_microbatches(32, 64, 1_024), choose_microbatches(32, 65, 1_024)) == (1, 4)  # 2,048 tokens stay whole


def test_the_shape_of_rows_by_hand():
    """With pieces of about 768 tokens. Without padding, packing may cost 12% more tokens at most."""
    # 4 prompts of 16 with 8 × 128: 1,040 tokens each. Rows of one completion are 8 · 144 = 1,152. 4 a piece.
    assert choose_rows(4, 16, 8, 128, CPU.piece_tokens) == (128, 4)
    # 4 prompts of 32: 1,056. Rows of one are 1,280, those of two 4 · 288 = 1,152. 2 a piece.
    assert choose_rows(4, 32, 8, 128, CPU.piece_tokens) == (256, 2)
    # With long prompts rows of eight would do, at 2 · 576 tokens where the group has 1,088, but not those of two.
    assert choose_rows(4, 64, 16, 64, CPU.piece_tokens) is None
    # Prompts that are long beside their completions are computed once.
    assert choose_rows(4, 512, 8, 64, CPU.piece_tokens) is None
    # Long completions have a row each: 8 · 1,040 tokens where the group has 8,208.
    assert choose_rows(4, 16, 8, 1_024, CPU.piece_tokens) == (1_024, 1)
    # All fits in one piece.
    assert choose_rows(2, 4, 4, 8, CPU.piece_tokens) is None


def test_pieces_are_packed_unless_their_number_is_given_or_the_method_does_not_pack():
    def piece(**changes):
        return choose_piece(4, 16, 8, 128, **{"microbatches": 0, "piece_tokens": 1_024, "packs": True} | changes)

    assert piece() == Piece(8, 1, 128, True)
    assert piece(piece_tokens=512) == Piece(4, 1, 128, True)
    assert piece(packs=False) == Piece(1, 8, 128)
    assert piece(microbatches=2) == Piece(2, 8, 128)
    assert piece(piece_tokens=5_000) == Piece(4, 8, 128)
