"""JAX: optax's place in a training step is taken by a transformation whose step shard servers make, of all workers' gradients.

python client/examples/with_jax.py 0 grpc://127.0.0.1:7070 & python client/examples/with_jax.py 1 grpc://127.0.0.1:7070
"""

import sys

import jax
from gradwire.jax import ShardedTransformation

worker, servers = int(sys.argv[1]), sys.argv[2:]
keys = jax.random.split(jax.random.key(0), 3)
params = {"hidden": jax.random.normal(keys[0], (64, 256)) / 8, "out": jax.random.normal(keys[1], (256, 10)) / 16}
teacher = jax.random.normal(keys[2], (64, 10))  # the same everywhere


def loss_of(params, inputs):
    logits = jax.nn.log_softmax(jax.nn.relu(inputs @ params["hidden"]) @ params["out"])
    return -(jax.nn.one_hot((inputs @ teacher).argmax(1), 10) * logits).sum(1).mean()


optimizer = ShardedTransformation(servers=servers, job="jax-example", learning_rate=4e-3, workers=2, worker=f"worker-{worker}")
state = optimizer.init(params)
params = optimizer.parameters(params)  # those of the job


@jax.jit
def train(params, state, inputs):
    loss, gradients = jax.value_and_grad(loss_of)(params, inputs)
    updates, state = optimizer.update(gradients, state, params)
    return jax.tree.map(jax.numpy.add, params, updates), state, loss


for step in range(301):
    inputs = jax.random.normal(jax.random.key(2 * step + worker), (64, 64))  # of this worker's own
    params, state, loss = train(params, state, inputs)
    if worker == 0 and step % 100 == 0:
        print(f"step {step}: loss {loss:.3f}, {optimizer.session.stats()['pushed_bytes'] / 1e3:.0f} kB pushed")
optimizer.close()
