"""Matrix capsules with EM routing in PyTorch, for pytorch_capsnet.py: the network of smallnorb_novel_viewpoint.py.

  public  as public PyTorch repositories write it: receptive fields gathered by lists of indices, votes by a broadcast
          product of 4x4 matrices with weights repeated for every sample, squared differences of all votes in memory
  tuned   as fast as we could: votes by one batched matrix product, weighted sums over votes and their squares by
          batched products, logits by two more
Both normalize the assignment probabilities over all parents of a child at all positions, as the paper does. Public
repositories do so within a position, which is less work.
"""
import torch
import torch.nn.functional as F


def children(side, K, stride, types):
    """Return the index of the child, among those of an image, that each parent position (row, column) has at each place
    of its receptive field (K, K, types): (positions, children)"""
    parents = (side - K) // stride + 1
    at = torch.arange(side * side * types).reshape(side, side, types)
    return at.unfold(0, K, stride).unfold(1, K, stride).permute(0, 1, 3, 4, 2).reshape(parents * parents, -1)


def places_of(child, n_children):
    """Return where each child stands in the receptive fields: (children, most) indices of child.flatten(), filled up
    with its length"""
    at = [[] for _ in range(n_children)]
    for place, one in enumerate(child.flatten().tolist()):
        at[one].append(place)
    most = max(map(len, at))
    return torch.tensor([places + [child.numel()] * (most - len(places)) for places in at])


def normalize(logits, child, places):
    """Return assignment probabilities (N, positions, I, J): a softmax over all parents of a child. child: (positions,
    I), see children, and places_of it; None: every parent has all children"""
    if child is None:
        return torch.softmax(logits, -1)
    highest = F.pad(logits.detach().amax(-1).flatten(1), (0, 1), value=-torch.inf)[:, places].amax(-1)
    R = torch.exp(logits - highest[:, child][..., None])
    return R / F.pad(R.sum(-1).flatten(1), (0, 1))[:, places].sum(-1)[:, child][..., None]


def route_public(V, a, beta_u, beta_a, n_iters, module, ratio, child=None, places=None):
    """Return mu (N, positions, J, 16) and the logits of the activations (N, positions, J). V: votes (N, positions, I,
    J, 16). a: activations of the children (N, positions, I)"""
    J = V.shape[3]
    R = normalize(V.new_zeros(V.shape[:4]), child, places)
    for t in range(n_iters):
        r = R * a[..., None]
        total = r.sum(2) + module.MASS_EPS                                              # (N, positions, J)
        share = (r / total[:, :, None])[..., None]
        mu = (share * V).sum(2, keepdim=True)
        sigma2 = (share * (V - mu) ** 2).sum(2, keepdim=True) + module.SIGMA2_EPS
        cost = (beta_u.view(1, 1, J, 1) + 0.5 * torch.log(sigma2[:, :, 0])).sum(-1) * ratio * total
        x = beta_a - module.LAMBDA * cost
        if t < n_iters - 1:
            log_p = -(V - mu) ** 2 / (2 * sigma2) - 0.5 * torch.log(sigma2)
            R = normalize(log_p.sum(-1) + F.logsigmoid(x)[:, :, None], child, places)
    return mu[:, :, 0], x


def route_tuned(V, a, beta_u, beta_a, n_iters, module, ratio, child=None, places=None):
    """The same for votes (N, positions, J, I, 16), with sums over i as batched products"""
    N, L, J, I, D = V.shape
    V = V.reshape(N * L, J, I, D)
    V2 = V * V
    R = normalize(V.new_zeros(N, L, I, J), child, places).transpose(2, 3)
    for t in range(n_iters):
        r = (R * a[:, :, None]).reshape(N * L, J, 1, I)
        total = r.sum(-1) + module.MASS_EPS                                             # (N*L, J, 1)
        mu, square = (r @ V)[:, :, 0] / total, (r @ V2)[:, :, 0] / total
        sigma2 = F.relu(square - mu * mu) + module.SIGMA2_EPS
        log_sigma2 = torch.log(sigma2).sum(-1)
        x = beta_a - module.LAMBDA * (D * beta_u + 0.5 * log_sigma2) * ratio * total[..., 0]
        if t < n_iters - 1:
            linear = mu / sigma2
            logits = (V @ linear[..., None] + V2 @ (-0.5 / sigma2)[..., None])[..., 0]
            logits = logits + (F.logsigmoid(x) - 0.5 * ((mu * linear).sum(-1) + log_sigma2))[..., None]
            R = normalize(logits.reshape(N, L, J, I).transpose(2, 3), child, places).transpose(2, 3)
    return mu.reshape(N, L, J, D), x.reshape(N, L, J)


def votes_public(M, W):
    """Return votes (N, positions, I, J, 16) of poses M (N, positions, I, 16)"""
    N, L, I, _ = M.shape
    poses = M.reshape(N * L, I, 1, 4, 4).repeat(1, 1, W.shape[1], 1, 1)
    return torch.matmul(poses, W[None].repeat(N * L, 1, 1, 1, 1)).reshape(N, L, I, W.shape[1], 16)


def votes_tuned(M, W):
    """Return votes (N, positions, J, I, 16) of poses M (N, positions, I, 16), by (N*positions*4, 4) @ (4, J*4) for each
    child"""
    N, L, I, _ = M.shape
    rows = M.reshape(N * L, I, 4, 4).permute(1, 0, 2, 3).reshape(I, -1, 4)
    votes = torch.bmm(rows, W.transpose(1, 2).reshape(I, 4, -1)).reshape(I, N * L, 4, -1, 4)
    return votes.permute(1, 3, 0, 2, 4).reshape(N, L, -1, I, 16)


def gather_public(x, side, K, stride):
    """Return the receptive fields of x (N, side, side, types, ...): (N, positions, K*K*types, ...), by lists of
    indices"""
    starts = range(0, side - K + 1, stride)
    index = [[start + k for k in range(K)] for start in starts]
    x = x[:, index][:, :, :, index]                     # (N, rows, K, columns, K, types, ...)
    return x.transpose(2, 3).flatten(3, 5).flatten(1, 2)


def gather_tuned(x, side, K, stride):
    """The same by views and one copy"""
    x = x.unfold(1, K, stride).unfold(2, K, stride)     # (N, rows, columns, types, ..., K, K)
    return x.permute(0, 1, 2, -2, -1, *range(3, x.ndim - 2)).flatten(3, 5).flatten(1, 2)


def write(module, config, public, convolve):
    """Return pytorch_capsnet.write's two functions for matrix-capsnet; convolve: its convolution"""
    votes, route, gather = ((votes_public, route_public, gather_public) if public else
                            (votes_tuned, route_tuned, gather_tuned))

    def convert(ours):
        """Return our weights, or gradients, as tensors: kernels (F, C, Ky, Kx); all else as it is"""
        return {name: torch.from_numpy(a.transpose(3, 2, 0, 1) if name.endswith("_w") else a).clone(
            memory_format=torch.contiguous_format) for name, a in ours.items()}

    convolutions, fields = module.convolutions(config), {}
    side, B = len(module.receptive_fields(convolutions)), convolutions[-1].F // 17       # of the primary capsules
    for conv in module.conv_caps(config):
        child = children(side, 3, conv.stride, B)
        fields[conv.name] = child, places_of(child, side * side * B)
        side, B = (side - 3) // conv.stride + 1, conv.F

    def forward(p, batch):
        x = batch["images"].permute(0, 3, 1, 2)
        for conv in convolutions:
            x = convolve(p, x, conv)
        x = x.permute(0, 2, 3, 1)                                                       # (N, side, side, B * 17)
        B = x.shape[-1] // 17
        pose, a = x[..., :16 * B].unflatten(-1, (B, 16)), torch.sigmoid(x[..., 16 * B:])

        def weights(name):
            return p[name + "_beta_u"], p[name + "_beta_a"], config.routing_iters, module
        for conv in module.conv_caps(config):
            side, B, J = x.shape[1], pose.shape[3], conv.F
            parents = (side - 3) // conv.stride + 1
            V = votes(gather(pose, side, 3, conv.stride), p[conv.name + "_W"])
            pose, x = route(V, gather(a, side, 3, conv.stride), *weights(conv.name),
                            parents * parents * J / (side * side * B), *fields[conv.name])
            pose, x = (y.unflatten(1, (parents, parents)) for y in (pose, x))
            a = torch.sigmoid(x)
        N, side, _, B, _ = pose.shape
        M, W = pose.reshape(N, 1, -1, 16), p["class_W"].repeat(side * side, 1, 1, 1)    # children: (position, type)
        V, J = votes(M, W), W.shape[1]
        xy = torch.as_tensor(module.receptive_field_centers(config), dtype=V.dtype).repeat_interleave(B, 0)
        shift = F.pad(torch.stack([F.pad(xy[:, k, None], (3, 0)) for k in (0, 1)], 1), (0, 0, 0, 2)).flatten(1)
        V = V + (shift[:, None] if public else shift)                                   # to the last column's top two
        mu, x = route(V, a.reshape(N, 1, -1), *weights("class"), J / M.shape[2])
        scores = x[:, 0]
        return {"scores": scores, "mu": mu[:, 0]}, F.cross_entropy(F.logsigmoid(scores), batch["labels"])
    return convert, forward
