{{/* What nccl.preset stands for: the variables by the kind of network between the nodes. nccl.env wins over them. */}}
{{- define "podtune.ncclPreset" -}}
{{- if eq .Values.nccl.preset "ethernet" }}
# The pod's own interface: with several, NCCL and gloo may choose one that the peers cannot reach.
NCCL_SOCKET_IFNAME: eth0
GLOO_SOCKET_IFNAME: eth0
# No InfiniBand: do not look for it.
NCCL_IB_DISABLE: "1"
# One TCP stream rarely fills a fast link: four threads with four sockets each.
NCCL_SOCKET_NTHREADS: "4"
NCCL_NSOCKS_PERTHREAD: "4"
# What the preflight holds the network to: 10 Gbit/s.
PODTUNE_BUS_GB_PER_S: "1.25"
NCCL_DEBUG: WARN
{{- else if eq .Values.nccl.preset "rdma" }}
# The rendezvous of NCCL itself goes over the pod's interface, the data over the adapters.
NCCL_SOCKET_IFNAME: eth0
GLOO_SOCKET_IFNAME: eth0
# Mellanox/NVIDIA adapters by prefix, whatever their count.
NCCL_IB_HCA: mlx5
# GPU memory straight to the adapter as long as both hang on the same CPU.
NCCL_NET_GDR_LEVEL: PHB
# A link that retrains must not end the job: 4.096 us * 2^22 is about 17 s a try.
NCCL_IB_TIMEOUT: "22"
NCCL_IB_RETRY_CNT: "13"
# What the preflight holds the network to: 100 Gbit/s.
PODTUNE_BUS_GB_PER_S: "12.5"
NCCL_DEBUG: WARN
{{- end }}
{{- end }}
