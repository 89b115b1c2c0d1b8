#!/usr/bin/env bash
# Deletes this virtual machine of Azure. A shutdown from inside leaves it "Stopped", which costs as much as one that runs. It is
# what end_without_head.sh ends with there:
#
#     END="bash $HOME/venv/bin/delete_azure_vm.sh" LIMIT_S=1200 bash ~/venv/bin/end_without_head.sh "$RAY_HEAD_IP"
#
# The right to do so is that of the cluster's managed identity, which Ray gives to each of its machines. Where it returns the
# machine is still there: its exit code is 1, and end_without_head.sh looks and calls it again. The disk and the network
# interface stay, as after every deletion that is not Ray's: `elastic cluster reap FILE` says how they are found and ended.
set -euo pipefail
imds=${IMDS:-http://169.254.169.254}        # what a machine asks about itself
arm=${ARM:-https://management.azure.com}    # Azure Resource Manager
wait_s=${WAIT_S:-600}                       # that a deletion may take

ask() { curl -fsS --max-time 30 --noproxy '*' -H Metadata:true "$imds/metadata/$1"; }

id=$(ask 'instance/compute/resourceId?api-version=2021-02-01&format=text')
token=$(ask 'identity/oauth2/token?api-version=2018-02-01&resource=https%3A%2F%2Fmanagement.azure.com%2F' |
    sed -n 's/.*"access_token" *: *"\([^"]*\)".*/\1/p')
[ -n "$token" ] || { echo "the metadata service has no token of a managed identity" >&2; exit 1; }
# from a file descriptor: the arguments of a process can be read by others
curl -fsS --max-time 60 -X DELETE -H @<(printf 'Authorization: Bearer %s\n' "$token") "$arm$id?api-version=2024-07-01"
sleep "$wait_s"
exit 1
