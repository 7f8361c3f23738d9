"""Isolated hosts on one machine: namespaces joined by links with a chosen bandwidth, delay and loss.

    with HostNetwork(("router", "prefill", "decode"), HostLink(bits_per_s=10e9, delay_ms=0.5)) as network:
        subprocess.Popen(network.command("prefill", ["python", "-m", "baton.prefill_worker", ...]))
        network.address("prefill")      # 10.77.0.3; address6 for IPv6; hosts also resolve the name
        network.shape("prefill", HostLink(bits_per_s=1e9, loss=0.01))
        network.cut("prefill"); network.mend("prefill")
        network.power_off("prefill"); network.boot("prefill")

A host has its own network, PIDs, IPC, /proc, /tmp and /dev/shm, and can write nowhere else, so that hosts share no
file, memory or signal. All hosts have the same host name and boot id. Needs root, iproute2, and a C compiler for
delays. Hosts and their processes end with the thread that created them, even on `kill -9`. `reach.py` connects from
outside.
"""
