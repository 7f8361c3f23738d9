"""Hosts that share nothing, on one machine: namespaces joined by links of a chosen bandwidth, delay and loss.

    with Network(("router", "prefill", "decode"), Link(bits_per_s=10e9, delay_ms=0.5)) as network:
        command = network.command("prefill", ["python", "-m", "baton.prefill_worker", ...])  # start it as you like
        subprocess.Popen(command)
        network.address("prefill")      # 10.77.0.3, as every host reaches it; address6 for IPv6, or its name
        network.shape("prefill", Link(bits_per_s=1e9, loss=0.01))
        network.cut("prefill"); network.mend("prefill")
        network.power_off("prefill"); network.boot("prefill")

A host has its own network, PIDs, IPC, /proc, /tmp and /dev/shm, and may write nowhere else: no file, shared memory or
signal crosses. All hosts have one host name and one boot id. Needs root, iproute2, and a C compiler for delays. Hosts
and all in them end with the thread that made them, `kill -9` included. `reach.py` connects from outside.
"""
