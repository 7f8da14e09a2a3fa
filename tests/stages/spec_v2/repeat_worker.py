"""A method from outside the package, as short as one can be."""

from __future__ import annotations

import torch

from stages.spec_v2.managers.overlap_utils import DecodeStep
from stages.spec_v2.model_executor.device_io import upload
from stages.spec_v2.model_executor.forward_batch_info import ForwardBatch
from stages.spec_v2.speculative.base_spec_worker import BaseSpecWorker
from stages.spec_v2.speculative.eagle_info import EagleVerifyInput


class RepeatWorker(BaseSpecWorker):
    """Guesses that the last token is said again and again.

    A chain without a draft model, all on the device.
    """

    def __init__(self, server_args, target_worker):
        n = server_args.speculative_num_draft_tokens
        super().__init__(server_args, target_worker, None, n, max_path=n - 1, is_chain=True)

    def forward_batch_generation(self, batch, on_publish):
        if batch.forward_mode.is_extend():
            forward_batch = ForwardBatch.init_new(batch, self.target_worker.model_runner)
            result = self.target_worker.forward_and_sample(batch, forward_batch)
            self.future_map.publish(forward_batch.req_pool_indices, forward_batch.seq_lens)
            on_publish()
            self.future_map.stash(forward_batch.req_pool_indices, result.next_token_ids[:, 0])
            return result
        inputs = upload(self.device, *batch.decode_inputs)
        step = DecodeStep.resolve(self.future_map, self.req_to_token_pool, *inputs, batch.seq_lens_cpu)
        verify_input = self.draft(step)
        greedy = batch.sampling_info.is_plain_greedy and not batch.return_logprob
        output = self.accept(verify_input, self.target_forward(verify_input, 1 if greedy else None), batch)
        output.result.start_read()
        on_publish()
        self.future_map.stash(step.req_pool_indices, output.paths.verified_id)
        return output.result

    def draft(self, step):
        bs, n = len(step.seq_lens), self.speculative_num_draft_tokens
        nodes = torch.arange(n)
        chain = torch.where(nodes + 1 < n, nodes + 1, -1).expand(bs, n).contiguous()
        return EagleVerifyInput(
            step,
            self.verify_slots(step),
            draft_token=step.output_tokens[:, None].expand(bs, n).contiguous(),
            tree_mask=((2 << nodes) - 1)[:, None].expand(bs, n, 1).contiguous(),
            positions=(step.seq_lens[:, None] + nodes).flatten(),
            retrieve_index=torch.arange(bs * n).view(bs, n),
            retrieve_next_token=chain,
            retrieve_next_sibling=torch.full((bs, n), -1),
        )
