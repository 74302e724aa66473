#!/bin/bash
# Two hosts as namespaces of this machine: own network, name, /dev/shm and folder for Ray; files are shared, and so are
# process ids. Their own names lead to the loopback, as on Debian and Ubuntu. Run by `unshare`, and ended with it.
# usage: up.sh FOLDER
set -euo pipefail
cd "$1"

# A host of its own: NAME ADDRESS PEER PEER_ADDRESS
become() {
    hostname "$1"
    ip link set lo up
    printf '127.0.0.1 localhost\n127.0.1.1 %s\n%s %s\n' "$1" "$4" "$3" >"$1.hosts"
    mount --bind "$1.hosts" /etc/hosts
    mount -t tmpfs none /dev/shm
    mount -t tmpfs none ray
}

mount --make-rprivate /
mkdir -p ray
unshare --net --uts --mount bash -c "$(declare -f become); become nodeb 10.77.0.2 nodea 10.77.0.1; echo \$\$ >nodeb.pid; exec -a nodeb-of-tests sleep infinity" &
until [ -s nodeb.pid ]; do sleep 0.1; done
become nodea 10.77.0.1 nodeb 10.77.0.2
echo $$ >nodea.pid
ip link add va type veth peer name vb
ip link set vb netns "$(cat nodeb.pid)"
ip addr add 10.77.0.1/24 dev va
ip link set va up
nsenter -t "$(cat nodeb.pid)" -n bash -c "ip addr add 10.77.0.2/24 dev vb; ip link set vb up"
echo up
exec -a nodea-of-tests sleep infinity
