"""A varlen kernel on the CPU, under the names and arguments of the libraries that have one for CUDA."""

import torch


class StandIn:
    """The arithmetic of a varlen kernel, one run at a time, under the names and arguments of both libraries.

    Causality and window are aligned with the last query and key; the backward pass takes any output and logsumexp, and
    a logsumexp of [H, T_q], contiguous, as the CUDA kernels read it. Takes head groups as they are.
    """

    def __init__(self):
        self.calls = []

    def runs(self, query, key, offsets_q, offsets_k, max_q, max_k, causal, scale, left, right):
        assert offsets_q.dtype == offsets_k.dtype == torch.int32 and len(offsets_q) == len(offsets_k)
        assert offsets_q[-1] == query.shape[0] and offsets_k[-1] == key.shape[0]
        assert offsets_q.diff().min() > 0 and offsets_k.diff().min() > 0
        assert (offsets_q.diff().max(), offsets_k.diff().max()) == (max_q, max_k)
        assert (right == 0) if causal else right in (-1, 0)
        for i in range(len(offsets_q) - 1):
            queries, keys = slice(offsets_q[i], offsets_q[i + 1]), slice(offsets_k[i], offsets_k[i + 1])
            num_q, num_k = queries.stop - queries.start, keys.stop - keys.start
            place = torch.arange(int(num_q))[:, None] + int(num_k - num_q) - torch.arange(int(num_k))
            visible = torch.ones_like(place, dtype=torch.bool)
            if right == 0:
                visible &= place >= 0
            if left >= 0:
                visible &= place <= left
            yield queries, keys, visible

    def scores(self, query, key, visible, scale, softcap):
        raw = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(query.shape[1] // key.shape[1], 1))
        raw = raw * (query.shape[-1] ** -0.5 if scale is None else scale)
        capped = softcap * torch.tanh(raw / softcap) if softcap else raw
        return capped.masked_fill(~visible, -torch.inf), capped

    def forward(self, query, key, value, offsets_q, offsets_k, max_q, max_k, causal, scale, left, right, softcap=0.0):
        self.calls.append((tuple(query.shape), tuple(key.shape), causal, left, right))
        out, lse = torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0])
        repeat = query.shape[1] // key.shape[1]
        settings = (offsets_q, offsets_k, max_q, max_k, causal, scale, left, right)
        for queries, keys, visible in self.runs(query, key, *settings):
            scores, _ = self.scores(query[queries], key[keys], visible, scale, softcap)
            lse[:, queries] = scores.logsumexp(-1)
            out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[keys].repeat_interleave(repeat, 1))
        return out, lse

    def backward(
        self, grad, query, key, value, out, lse, offsets_q, offsets_k, max_q, max_k, causal, scale, left, right,
        softcap=0.0,
    ):  # fmt: skip
        assert all(tensor.is_contiguous() for tensor in (grad, query, key, value, out, lse))
        dq, dk, dv = (torch.zeros_like(tensor) for tensor in (query, key, value))
        heads = (key.shape[1], query.shape[1] // key.shape[1])
        delta = (grad * out).sum(-1).t()
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        settings = (offsets_q, offsets_k, max_q, max_k, causal, scale, left, right)
        for queries, keys, visible in self.runs(query, key, *settings):
            scores, capped = self.scores(query[queries], key[keys], visible, scale, softcap)
            p = (scores - lse[:, queries, None]).exp()
            dp = torch.einsum("qhd,khd->hqk", grad[queries], value[keys].repeat_interleave(heads[1], 1))
            ds = p * (dp - delta[:, queries, None]) * factor
            if softcap:
                ds = ds * (1 - (capped / softcap) ** 2)
            dq[queries] = torch.einsum("hqk,khd->qhd", ds, key[keys].repeat_interleave(heads[1], 1))
            dk[keys] = torch.einsum("hqk,qhd->khd", ds, query[queries]).unflatten(1, heads).sum(2)
            dv[keys] = torch.einsum("hqk,qhd->khd", p, grad[queries]).unflatten(1, heads).sum(2)
        return dq, dk, dv

    # The operators behind torch.nn.attention.varlen.
    def _flash_attention_forward(
        self, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
        scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        assert (dropout_p, return_debug_mask) == (0.0, False)
        places = (cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale, window_size_left, window_size_right)
        return *self.forward(query, key, value, *places), None, None, None

    def _flash_attention_backward(
        self, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        assert dropout_p == 0.0
        places = (cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale, window_size_left, window_size_right)
        return self.backward(grad_out, query, key, value, out, logsumexp, *places)

    # flash_attn.flash_attn_interface, version 2.8.
    def _flash_attn_varlen_forward(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    ):  # fmt: skip
        assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
        places = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale)
        return *self.forward(q, k, v, *places, window_size_left, window_size_right, softcap), None, None

    def _flash_attn_varlen_backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, alibi_slopes, deterministic) == (0.0, None, False)
        places = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale)
        window = (window_size_left, window_size_right, softcap)
        gradients = self.backward(dout, q, k, v, out, softmax_lse, *places, *window)
        for mine, theirs in zip((dq, dk, dv), gradients, strict=True):
            mine.copy_(theirs)
