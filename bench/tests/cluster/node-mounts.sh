# Gives a node's mount namespace what a machine of its own would have: /proc, /sys, /run, bpffs, and the folders of kubelet,
# containerd and the CNI plugins, which lie below $STATE. Everything here ends with the namespace.
set -eu
mount --make-rprivate /
mount -t proc proc /proc
# A sysfs shows the network namespace in which it was mounted. The control groups stay the machine's.
mount --rbind /sys/fs/cgroup "$STATE/cgroup"
umount -l /sys
mount -t sysfs sysfs /sys
mount --rbind "$STATE/cgroup" /sys/fs/cgroup
umount -l "$STATE/cgroup"
[ "$BPFFS" = no ] || mount -t bpf bpf /sys/fs/bpf
mount -t tmpfs tmpfs /run
mkdir -p /run/netns /run/lock
for folder in var/lib/kubelet var/lib/containerd var/lib/cni etc/cni/net.d var/log/pods var/log/containers; do
    mkdir -p "/$folder" "$STATE/$folder"
    mount --bind "$STATE/$folder" "/$folder"
done
# Containers may pass mounts on to the node.
mount --make-rshared /
