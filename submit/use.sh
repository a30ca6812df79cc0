# Say once in a shell which site this is:  . submit/use.sh perlmutter
# What sbatch has to know before a job exists (account, partition, constraint) is in variables SBATCH_..., which it reads. They stand
# above the #SBATCH lines of a script, and below what you write on the command line.
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    echo "source it, so that it can change this shell: . submit/use.sh ${1:-NAME}" >&2
    exit 1
fi
_site=$(dirname "${BASH_SOURCE[0]}")/sites/${1:-generic}.sh
if [ ! -f "$_site" ]; then
    echo "there is no $_site: copy sites/generic.sh to it, and see submit/README.md" >&2
    unset _site
    return 1
fi
# shellcheck disable=SC1090
. "$_site" && export COURSE_SITE=${1:-generic}
unset _site
