"""Data-parallel training with Keras on 4 hosts with 4 chips each.

    python examples/keras_data_parallel.py

Trains a small network on scikit-learn's handwritten digits. Every host runs the function and feeds
its own quarter of the data. After each step, Keras averages the gradients across the slice, which
keeps the weights equal on all 16 devices.

Two rules make this work on more than one host:

- each process feeds its own part of the data, as NumPy arrays, with `auto_shard_dataset=False`
  (by default, Keras accepts only a `tf.data.Dataset`);
- every process takes the same number of steps, so the parts have the same length.
"""

import kinetic


@kinetic.run(accelerator="tpu-v6e-16")
def train(epochs=10):
    import jax
    import keras
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    hosts, host = jax.process_count(), jax.process_index()
    keras.utils.set_random_seed(0)  # Every host must start from the same weights.

    devices = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh(
        shape=(len(devices),), axis_names=["batch"], devices=devices
    )
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(device_mesh=mesh, auto_shard_dataset=False)
    )

    images, labels = load_digits(return_X_y=True)
    split = train_test_split(
        (images / 16).astype("float32"), labels, train_size=1408, test_size=384, random_state=0
    )
    x_train, x_test, y_train, y_test = (
        part[host::hosts] for part in split
    )  # This host's quarter of each.

    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, "relu"),
            # With zeros, all digits are equally likely at first.
            keras.layers.Dense(10, "softmax", kernel_initializer="zeros"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )

    class Progress(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            print(
                f"epoch {epoch + 1:2d}/{epochs}  loss {logs['loss']:.3f}  accuracy "
                f"{logs['accuracy']:.3f}",
                flush=True,
            )

    print(f"host {host} of {hosts}: {len(x_train)} of {hosts * len(x_train)} images", flush=True)
    model.fit(
        x_train,
        y_train,
        batch_size=88,
        epochs=epochs,
        verbose=0,
        shuffle=True,
        callbacks=[Progress()],
    )
    # Averages over the test images of all hosts.
    _, accuracy = model.evaluate(x_test, y_test, batch_size=96, verbose=0)
    return {"accuracy": float(accuracy), "devices": jax.device_count(), "hosts": hosts}


def main():
    result = train()
    print(
        f"test accuracy {result['accuracy']:.3f} on {result['devices']} devices of "
        f"{result['hosts']} hosts"
    )


if __name__ == "__main__":
    main()
